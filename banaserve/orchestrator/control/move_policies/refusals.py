"""Conditions that forbid a move, whatever its benefit."""

from __future__ import annotations

from banaserve.orchestrator.control.move_policies.interface import RejectReason
from banaserve.orchestrator.control.projection.projection import Projected


def may_change(
    instance: Projected, now_s: float, dwell_s: float, max_moves: float
) -> RejectReason | None:
    """Return why ``instance`` must not change at present, or None."""
    if instance.num_moves >= max_moves:
        return RejectReason.BUSY
    if instance.changed_s is not None and now_s - instance.changed_s < dwell_s:
        return RejectReason.DWELL
    return None


def may_host(host: Projected) -> RejectReason | None:
    """Return why ``host`` may not give modules away, or None.

    An instance that holds modules of others sends those home first: else loads would move in
    circles, and a request's step would wait for a chain of instances.
    """
    return RejectReason.HOST_IS_GUEST if host.num_guests else None


def may_guest(guest: Projected) -> RejectReason | None:
    """Return why ``guest`` may not take modules, or None."""
    return RejectReason.GUEST_SHEDS if guest.away else None


def may_pair(host: Projected, guest: Projected, heads: bool) -> RejectReason | None:
    """Return why no heads, or no layers, may move from ``host`` to ``guest``, or None."""
    if guest.id in host.far and host.far[guest.id] is None:
        return RejectReason.NOT_MEASURED
    ours, theirs = host.facts, guest.facts
    supported = (
        ours.can_move_heads and theirs.can_move_heads
        if heads
        else ours.can_move_layers and theirs.can_move_layers
    )
    if not supported:
        return RejectReason.NOT_SUPPORTED
    dimensions = (ours.num_layers, ours.num_kv_heads, ours.layer_weight_bytes)
    others = (theirs.num_layers, theirs.num_kv_heads, theirs.layer_weight_bytes)
    if dimensions != others or ours.layer_token_bytes != theirs.layer_token_bytes:
        return RejectReason.OTHER_MODEL
    return None
