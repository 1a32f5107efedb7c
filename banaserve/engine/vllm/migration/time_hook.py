"""Place for an engine in modelled time to spend what a migration takes on the modelled hardware."""

from __future__ import annotations

from banaserve.engine.vllm.migration.units.base import MigrationUnit


class TimeHook:
    """Called where a host has done a piece of a migration, before it goes on; does nothing.

    Each method may block, and is part of what the host measures. It is called by the thread that
    did the work: ``committed`` by the engine's, between two steps, the others by any.
    """

    def copied(self, num_bytes: int, took_s: float) -> None:
        """Blocks of KV are where they should be.

        Args:
            num_bytes: That were copied.
            took_s: Seconds since the copy began.
        """

    def built(self, modules: MigrationUnit, took_s: float) -> None:
        """A guest has built modules.

        Args:
            took_s: Seconds since it was asked to.
        """

    def committed(self) -> None:
        """The model's proxies are in place; the engine still stands still."""


REAL_TIME = TimeHook()
"""Of engines whose migrations take the time that they take."""
