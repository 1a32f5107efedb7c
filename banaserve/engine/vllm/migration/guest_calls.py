"""What a host asks of its guests beside steps and moves; between two steps."""

from __future__ import annotations

from banaserve.engine.vllm.migration import messages
from banaserve.engine.vllm.migration.host import MigrationHost


def usage_of(host: MigrationHost, guest_id: str) -> messages.Usage:
    """What a guest that is not building takes.

    Raises:
        MigrationError: It is, or is not attached, or is lost.
    """
    return host.free_link(guest_id).ask(messages.GetUsage(), messages.Usage)


def bound_share(host: MigrationHost, guest_id: str, fraction: float) -> None:
    """Let a guest that is not building compute for at most ``fraction`` of the time.

    Raises:
        MigrationError: It is, or is not attached, or is lost; or the fraction is out of range.
    """
    link = host.free_link(guest_id)
    link.ask(messages.SetShare(fraction), messages.Done)
    link.share = fraction
