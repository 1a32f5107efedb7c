"""Parent of the process that decides: it passes signals on, and starts the process again.

It does nothing else, so that little can end it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType

from banaserve_route.balancer.relays.processes import RestartPauses

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class Supervision:
    """Descriptors of pipes to the supervisor, which end with it.

    Attributes:
        signals: Pipe with the numbers of the signals that the supervisor receives.
        life: Pipe without content, for the relays.
    """

    signals: int
    life: int


def supervise(
    decide: Callable[[Supervision], int],
    listening: Sequence[socket.socket],
    log: Callable[[str], None],
) -> int:
    """Run ``decide`` in a child process, and again whenever a signal has killed it.

    Returns in the child alone, with the result of ``decide``; this process exits as the child does.

    Args:
        listening: Sockets on which connections wait while no child runs.
    """
    received: list[int] = []
    pauses = RestartPauses()
    life, held = os.pipe()
    while True:
        reading, writing = os.pipe()

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
        for each in _SIGNALS:
            signal.signal(each, forward if pid else signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        if pid == 0:
            os.close(writing)
            os.close(held)
            return decide(Supervision(reading, life))
        os.close(reading)
        code = _wait(pid)
        if code >= 0:
            sys.exit(code)
        if not received:
            log(f"the process that decides has ended: signal {-code}")
            time.sleep(pauses.next_s())
        if received:
            sys.exit(128 + received[0])
        os.close(writing)


def _wait(pid: int) -> int:
    """Return the exit code of a child when it has ended, or minus the signal that has killed it."""
    while True:
        # As the first process of a container, this one is the parent of orphans too.
        ended, status = os.wait()
        if ended == pid:
            return os.waitstatus_to_exitcode(status)
