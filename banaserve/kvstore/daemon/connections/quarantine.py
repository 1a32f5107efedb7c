"""Quarantine of slots whose connection was lost, until no process can read or write them."""

from __future__ import annotations

import os
import selectors
from collections.abc import Callable, Sequence


class Quarantine:
    """Watch over the processes of lost connections until they die.

    A connection can end while its process, or another process of the same client, is still copying
    into the slots that it had reserved. Those slots are given to no other client before every
    such process is dead.

    Args:
        selector: Selector that waits for the processes' pidfds.
        on_over: Callback with the session's id after the last of its processes has died.
    """

    def __init__(self, selector: selectors.BaseSelector, on_over: Callable[[int], None]) -> None:
        self._selector = selector
        self._on_over = on_over
        self._alive: dict[int, set[int]] = {}

    def __len__(self) -> int:
        return len(self._alive)

    def hold(self, session_id: int, pidfds: Sequence[int]) -> None:
        """Wait for all of ``pidfds``, which belong to the quarantine from now on."""
        self._alive[session_id] = set(pidfds)
        for pidfd in pidfds:
            self._selector.register(
                pidfd,
                selectors.EVENT_READ,
                lambda _, pidfd=pidfd: self._on_death(session_id, pidfd),
            )

    def close(self) -> None:
        """Stop waiting."""
        for pidfds in self._alive.values():
            for pidfd in pidfds:
                self._forget(pidfd)
        self._alive.clear()

    def _on_death(self, session_id: int, pidfd: int) -> None:
        self._forget(pidfd)
        alive = self._alive[session_id]
        alive.remove(pidfd)
        if not alive:
            del self._alive[session_id]
            self._on_over(session_id)

    def _forget(self, pidfd: int) -> None:
        self._selector.unregister(pidfd)
        os.close(pidfd)
