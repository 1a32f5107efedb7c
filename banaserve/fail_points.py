"""Points at which tests let a process fail; without BANASERVE_FAIL_POINTS they do nothing.

The variable names a folder when a process starts. A file in it with the name of a point arms that
point, also while the server runs: ``kill``, ``stop`` (SIGSTOP) or ``error``, and behind a blank at
which pass of one process, the first if it does not say. Who fails removes the file first: one
process of the server fails, once. ``wait`` and a number of seconds holds up every pass of every
process for as long as the file is there: a slow disk.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path

VARIABLE = "BANASERVE_FAIL_POINTS"


class FailPoint(StrEnum):
    """Where a process may be let fail."""

    STORE_BEFORE_REPLY = "store.before_reply"
    SSD_WRITE = "ssd.write"
    SSD_READ = "ssd.read"
    PEER_REQUEST = "peer.request"
    PEER_PUSH = "peer.push"
    CLIENT_BEFORE_EXCHANGE = "client.before_exchange"
    CLIENT_BEFORE_COMMIT = "client.before_commit"
    CLIENT_AFTER_COMMIT = "client.after_commit"
    CONNECTOR_LOAD = "connector.load"
    CONNECTOR_SAVE = "connector.save"
    LAUNCHER_ORDER = "launcher.order"
    ENGINE_START = "engine.start"
    MOVE_PREPARE = "move.prepare"
    MOVE_PRECOPY = "move.precopy"
    MOVE_COMMIT = "move.commit"
    MOVE_FREE = "move.free"
    GUEST_BUILD = "guest.build"
    GUEST_RUN = "guest.run"
    GUEST_ACTIVATE = "guest.activate"


class InjectedError(OSError):
    """What ``error`` raises: a full disk."""

    def __init__(self, point: FailPoint) -> None:
        super().__init__(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} (fail point {point})")


class _Armed:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._passes: Counter[FailPoint] = Counter()

    def reach(self, point: FailPoint) -> None:
        path = self._folder / point
        try:
            action, _, at = path.read_text().partition(" ")
        except FileNotFoundError:
            self._passes[point] = 0
            return
        if action == "wait":
            time.sleep(float(at))
            return
        self._passes[point] += 1
        if self._passes[point] < int(at or 1):
            return
        try:
            path.unlink()
        except FileNotFoundError:  # another process was first
            return
        if action == "error":
            raise InjectedError(point)
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[action])


def _pass(point: FailPoint) -> None:
    """Go on."""


_folder = os.environ.get(VARIABLE)
reach: Callable[[FailPoint], None] = _Armed(Path(_folder)).reach if _folder else _pass
"""Fail here if a test asks for it. Raises ``InjectedError`` where it asks for an error."""
