"""A process and all below it, as far as it has been seen."""

from __future__ import annotations

import contextlib

import psutil


class ProcessTree:
    """What a process has started is remembered when its parent has ended.

    Args:
        pid: Of the process on top.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._seen: set[psutil.Process] = set()

    def alive(self) -> list[psutil.Process]:
        """All of them that live."""
        try:
            own = psutil.Process(self._pid)
            self._seen.update((own, *own.children(recursive=True)))
        except psutil.NoSuchProcess:
            pass
        return [one for one in self._seen if _lives(one)]

    def signal(self, number: int) -> None:
        """Send a signal to all of them, as a machine that stops or dies does."""
        for one in self.alive():
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                one.send_signal(number)


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
