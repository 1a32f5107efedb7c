"""Parent of the process that decides: it passes signals on, and starts a dead or hung one again.

It does nothing else, so that little can end it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType

from banaserve_route.balancer.relays.processes import (
    BEAT_S,
    MAX_SILENT_BEATS,
    START_BEATS,
    RestartPauses,
)

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class Supervision:
    """Descriptors of pipes to the supervisor, which end with it.

    Attributes:
        signals: Pipe with the numbers of the signals that the supervisor receives.
        life: Pipe without content, for the relays.
        beats: Pipe to which the process that decides writes while its event loop runs.
    """

    signals: int
    life: int
    beats: int

    async def beat(self) -> None:
        """Show at intervals that the event loop runs, from now on: the supervisor counts on it."""
        os.set_blocking(self.beats, False)
        while True:
            with contextlib.suppress(OSError):  # the supervisor has ended, or stands still
                os.write(self.beats, b".")
            await asyncio.sleep(BEAT_S)


def supervise(
    decide: Callable[[Supervision], int],
    listening: Sequence[socket.socket],
    log: Callable[[str], None],
) -> int:
    """Run ``decide`` in a child process, and again whenever a signal has killed it or it hangs.

    Returns in the child alone, with the result of ``decide``; this process exits as the child does.

    Args:
        listening: Sockets on which connections wait while no child runs.
    """
    received: list[int] = []
    pauses = RestartPauses()
    life, held = os.pipe()
    while True:
        reading, writing = os.pipe()
        heard, beats = os.pipe()

        def forward(number: int, _: FrameType | None, to: int = writing) -> None:
            received.append(number)
            for sock in listening:
                sock.close()
            with contextlib.suppress(OSError):  # the child has ended
                os.write(to, bytes([number]))

        # Until each process has its handlers: a signal comes to both if it is sent to the group.
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        sys.stdout.flush()
        pid = os.fork()
        for number in _SIGNALS:
            signal.signal(number, forward if pid else signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        if pid == 0:
            for each in (writing, held, heard):
                os.close(each)
            return decide(Supervision(reading, life, beats))
        for each in (reading, beats):
            os.close(each)
        if _hangs(heard):
            log("the process that decides is killed: it hangs")
            os.kill(pid, signal.SIGKILL)
        os.close(heard)
        code = _wait(pid)
        if code >= 0:
            sys.exit(code)
        if not received:
            log(f"the process that decides has ended: signal {-code}")
            time.sleep(pauses.next_s())
        if received:
            sys.exit(128 + received[0])
        os.close(writing)


def _hangs(heard: int) -> bool:
    """Return False when the writer of ``heard`` has ended, True when it is silent too long."""
    num_silent = MAX_SILENT_BEATS - START_BEATS
    while num_silent < MAX_SILENT_BEATS:
        num_silent += 1
        if select.select([heard], [], [], BEAT_S)[0]:
            if not os.read(heard, 4096):
                return False
            num_silent = 0
    return True


def _wait(pid: int) -> int:
    """Return the exit code of a child when it has ended, or minus the signal that has killed it."""
    while True:
        # As the first process of a container, this one is the parent of orphans too.
        ended, status = os.wait()
        if ended == pid:
            return os.waitstatus_to_exitcode(status)
