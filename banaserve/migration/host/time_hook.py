"""Hook for an engine in modelled time to spend a migration's time on the modelled hardware."""

from __future__ import annotations

from banaserve.migration.units.base import MigrationUnit


class TimeHook:
    """Hook that a host calls after each part of a migration, before it goes on; does nothing.

    Each method may block; the host's measurements include the time of the call. A method is called
    by the thread that did the work: ``committed`` by the engine's thread between two steps, the
    others by any thread.
    """

    def copied(self, num_bytes: int, took_s: float) -> None:
        """Handle the end of a copy of KV blocks.

        Args:
            took_s: Time since the copy began, in seconds.
        """

    def built(self, modules: MigrationUnit, took_s: float) -> None:
        """Handle the end of building modules in a guest.

        Args:
            took_s: Time since the guest was asked to build them, in seconds.
        """

    def committed(self) -> None:
        """Handle a commit: the model's proxies are in place, the engine still stands still."""


REAL_TIME = TimeHook()
"""Hook of engines in real time, which add no time to a migration."""
