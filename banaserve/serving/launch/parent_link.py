"""Connection to an engine parent: orders with a deadline, and the parent's end."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
import time

from banaserve.base.errors import BanaServeError, ProtocolError
from banaserve.base.platform.processes import end_child, in_daemon_thread, is_running
from banaserve.serving.launch import messages
from banaserve.serving.launch.messages import spawn

ORDER_S = 10.0
"""Maximum wait for the answer to an order, in seconds; a fork takes some ten milliseconds."""
START_S = 90.0
"""Maximum start time of a parent, in seconds.

Its imports of all that engines need take ten seconds, more on a busy machine.
"""
_END_S = 5.0


class ParentLostError(BanaServeError):
    """Error of an engine parent that has ended or does not answer: start another one."""


class ParentLink:
    """Connection to one engine parent, for orders.

    Args:
        control: Socket end of this process; the parent takes orders from the other end.
        process: Owner of the child process; None if it was forked here.
    """

    def __init__(
        self, control: socket.socket, pid: int, process: subprocess.Popen[bytes] | None = None
    ) -> None:
        self.is_lost = False
        self._control = control
        self._pid = pid
        self._process = process
        self._started: list[int] = []
        # One order at a time: the thread of a cancelled order still reads that order's answer.
        self._lock = threading.Lock()

    def order(self, order: messages.Order, timeout_s: float = ORDER_S) -> int:
        """Give an order and return the process id of the engine or guest that was started. Blocks.

        Raises:
            ParentLostError: The parent has ended, or has not answered in time.
        """
        with self._lock:
            pid = self._read(timeout_s, order)
            self._started.append(pid)
            return pid

    def wait_ready(self) -> None:
        """Return when a parent in a new process takes orders. Blocks.

        Raises:
            ParentLostError: The parent has ended, or is not ready in time.
        """
        with self._lock:
            self._read(START_S, None)

    def _read(self, timeout_s: float, order: messages.Order | None) -> int:
        """Give an order and return the answer; if None, wait until the parent is ready."""
        if self.is_lost:
            raise ParentLostError("the engine parent is lost")
        try:
            self._control.settimeout(timeout_s)
            if order is not None:
                messages.send(self._control, order)
            until_s = time.monotonic() + timeout_s
            while (answer := messages.receive(self._control)) is not None:
                match answer:
                    case messages.ParentReady() if order is None:
                        return 0
                    case messages.Started(name, pid) if order and name == messages.name_of(order):
                        return pid
                self._control.settimeout(max(0.001, until_s - time.monotonic()))
        except (OSError, ProtocolError) as error:
            self.is_lost = True
            what = "does not answer" if isinstance(error, TimeoutError) else "has ended"
            raise ParentLostError(f"the engine parent {what}") from error
        self.is_lost = True
        raise ParentLostError("the engine parent has ended")

    @property
    def has_engines(self) -> bool:
        """True if a process that the parent has started still runs."""
        self._started = [pid for pid in self._started if is_running(pid)]
        return bool(self._started)

    @property
    def is_running(self) -> bool:
        """True if the parent's process runs, though it may not answer."""
        return bool(self._pid) and is_running(self._pid)

    def close(self, patience_s: float = _END_S) -> None:
        """End the parent and all that it has started; kill it after ``patience_s``. Blocks."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)  # closing alone wakes no reading thread
        self._control.close()
        if self._pid:
            end_child(self._pid, patience_s)
        if self._process is not None:
            self._process.poll()  # reaped already: lets the Popen object know


async def start_parent(vllm_argv: list[str]) -> ParentLink:
    """Start an engine parent as a new process: this process has threads, so it must not fork.

    Args:
        vllm_argv: vLLM's options of engines that are ordered without options.

    Raises:
        ParentLostError: The parent does not start; its output says why.
    """
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            launch = messages.ParentLaunch(vllm_argv, theirs.fileno())
            descriptors = (theirs.fileno(),)
            process = spawn(launch, os.environ, pass_fds=descriptors, in_session=True)
    except OSError as error:
        ours.close()
        raise ParentLostError(f"no engine parent can be started: {error.strerror}") from error
    link = ParentLink(ours, process.pid, process)
    try:
        await in_daemon_thread(link.wait_ready)
    except BaseException:
        link.close(patience_s=0.0)
        raise
    return link
