"""Points at which tests make a process fail; without BANASERVE_FAIL_POINTS they do nothing.

The variable is read when a process starts and names a folder. A file in that folder with the name
of a point arms the point, also while the server runs. The file holds ``kill``, ``stop`` (SIGSTOP)
or ``error`` and, after a space, the number of the pass of one process that fails (default: the
first). The process that fails removes the file first: one process of the server fails, once.
``wait`` and a number of seconds delay every pass of every process while the file exists, which
imitates a slow disk.
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
    """Names of the points at which a test can make a process fail."""

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
    """Error that a point armed with ``error`` raises: a full disk."""

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
    """Do nothing: fail points are off."""


_folder = os.environ.get(VARIABLE)
reach: Callable[[FailPoint], None] = _Armed(Path(_folder)).reach if _folder else _pass
"""Fail at this point if a test has armed it; raises ``InjectedError`` if armed with ``error``."""
