"""Processes that may be no children of this process, and threads that may outlive an event loop."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import os
import select
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

T = TypeVar("T")
_PR_SET_NAME = 15
_PR_SET_PDEATHSIG = 1
_PIDFD_THREAD = os.O_EXCL
_LIFE = "banaserve-life"
"""Name of the threads that end with their process; Linux keeps 15 characters of a name."""


def die_with_parent(parent_pid: int = 0) -> None:
    """Ask the kernel to kill this process when the thread that started it ends.

    Args:
        parent_pid: Process id of the parent, or 0 if not known; this process exits at once if the
            parent has already ended.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent_pid and os.getppid() != parent_pid:
        os._exit(1)


def is_running(pid: int) -> bool:
    """Return whether process ``pid`` exists and has not ended; a stopped process has not ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")


def own_folder(parent: Path) -> Path:
    """Make an empty folder of this process in ``parent``, and remove those of ended processes."""
    for other in parent.glob("*.of"):
        if other.stem.isdecimal() and not is_running(int(other.stem)):
            shutil.rmtree(other, ignore_errors=True)
    own = parent / f"{os.getpid()}.of"
    shutil.rmtree(own, ignore_errors=True)
    own.mkdir(mode=0o700)
    return own


def end_child(pid: int, patience_s: float) -> None:
    """Wait ``patience_s`` at most for a child's end, then kill the child; reap it. Blocking."""
    handle = ProcessHandle.open(pid)
    if handle is not None:
        handle.end(patience_s)
        handle.close()
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def end_now(code: int) -> NoReturn:
    """End this process as the interpreter does, but without destroying every object.

    With vLLM imported, destroying them takes a second of processor time, ten seconds on a busy
    machine, while a supervisor waits. Functions registered with ``atexit`` run; threads are not
    waited for.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


async def wait_ended(pid: int) -> None:
    """Return when process ``pid`` has ended; at once if there is no such process."""
    with contextlib.suppress(ProcessLookupError):
        await _wait_any([os.pidfd_open(pid)])


def show_life() -> threading.Event:
    """Let ``wait_dying`` notice the death of this process at once, before its memory is freed.

    Setting the returned event lets ``wait_dying`` return as well, though the process goes on.

    Linux frees a process's memory in the last of its threads to end, and reports the process's end
    after that: a tenth of a second later for an engine of a gigabyte. Of two threads that live as
    long as the process, at least one is not the last.
    """
    until = threading.Event()
    for _ in range(2):
        threading.Thread(target=_live, args=(until,), daemon=True).start()
    return until


def _live(until: threading.Event) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_NAME, _LIFE.encode())
    until.wait()


async def wait_dying(pid: int) -> None:
    """Return when process ``pid`` has begun to end; its memory may not have been freed yet.

    If the process has not called ``show_life``, and before Linux 6.9, return when it has ended.
    """
    with contextlib.suppress(ProcessLookupError):
        await _wait_any([os.pidfd_open(pid), *_open_life(pid)])


def _open_life(pid: int) -> list[int]:
    """Return descriptors of the threads that ``show_life`` has started in process ``pid``."""
    found: list[int] = []
    with contextlib.suppress(OSError):  # the process has ended meanwhile
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # it has ended, or there are no thread pidfds
                if (thread / "comm").read_text().strip() == _LIFE:
                    found.append(os.pidfd_open(int(thread.name), _PIDFD_THREAD))
    return found


async def _wait_any(descriptors: Sequence[int]) -> None:
    """Return when one of ``descriptors`` is readable; close all of them."""
    try:
        await wait_readable(descriptors)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


async def wait_readable(descriptors: Sequence[int]) -> None:
    """Return when one of ``descriptors`` is readable, or closed at its other end."""
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()

    def note() -> None:
        if not readable.done():
            readable.set_result(None)

    for descriptor in descriptors:
        loop.add_reader(descriptor, note)
    try:
        await readable
    finally:
        for descriptor in descriptors:
            loop.remove_reader(descriptor)


def in_daemon_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """Run ``work`` in its own thread, which may outlive the event loop; return its future result.

    For work that may block for ever: a closing loop waits for threads of ``asyncio.to_thread``.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as failure:
            error = failure
        with contextlib.suppress(RuntimeError):  # the loop has closed
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, daemon=True).start()
    return future


class ProcessHandle:
    """Handle of a process that reliably ends it.

    Args:
        descriptor: Pidfd of the process, which never refers to a later process with the same id.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()

    @classmethod
    def open(cls, pid: int) -> ProcessHandle | None:
        """Return a handle of process ``pid``; None if it does not exist or may not be signalled."""
        try:
            handle = cls(os.pidfd_open(pid))
        except OSError:
            return None
        try:
            signal.pidfd_send_signal(handle._descriptor, 0)
        except OSError:
            handle.close()
            return None
        return handle

    def end(self, patience_s: float) -> None:
        """Wait for the process's end; kill the process unless it ends within ``patience_s``."""
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        if not poll.poll(1000.0 * patience_s):
            self.kill()

    def kill(self) -> None:
        """Kill the process and return when it has ended: from then on it writes no memory."""
        with self._lock:
            if self._descriptor < 0:
                return
            try:
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)
            except ProcessLookupError:
                return
            poll = select.poll()
            poll.register(self._descriptor, select.POLLIN)
            poll.poll()

    def close(self) -> None:
        """Close the descriptor."""
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
            self._descriptor = -1


class Pulse:
    """Activity of a process on this machine, judged by the growth of its processor time.

    The time of its descendants counts too: a process that compiles a kernel waits for a compiler.

    Args:
        pid: Process id; None for a process on another machine, whose work is not known.
    """

    def __init__(self, pid: int | None) -> None:
        self._pid = pid
        self._own = self._below = -1
        self._worked_s = 0.0

    @property
    def is_known(self) -> bool:
        return self._pid is not None

    def last_worked_s(self, now_s: float, *, with_descendants: bool = True) -> float:
        """Return when the process was last seen to work, on the caller's clock; 0 for never.

        Args:
            with_descendants: False to read one file instead of one for each thread.
        """
        own = -1 if self._pid is None else _ticks(self._pid)
        if self._pid is None or own < 0:
            return self._worked_s
        below = _ticks_below(self._pid) if with_descendants else self._below
        if own > self._own >= 0 or below != self._below >= 0:
            self._worked_s = now_s
        self._own, self._below = own, below
        return self._worked_s


def _ticks(pid: int) -> int:
    """Return the processor time of a process and its ended children, in clock ticks.

    Returns:
        -1 if there is no such process.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return -1
    return sum(map(int, fields[11:15]))


def _ticks_below(pid: int) -> int:
    """Return the processor time of a process's live descendants; it changes while they work."""
    total = 0
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread or a process has ended meanwhile
            for child in map(int, listed.read_text().split()):
                total += max(0, _ticks(child)) + _ticks_below(child)
    return total


class StallWatch:
    """Detector of stalls in a process that reports periodically, and in its successors.

    Args:
        stall_s: Maximum silence of a process that certainly does nothing, in seconds.
        spin_s: Maximum silence of any process, in seconds.
        counts_work: True if processor time of the process or of its descendants, such as
            compilers, counts as work: a step of a large model on a CPU takes minutes. On a GPU it
            proves nothing: a processor that waits for a GPU may be busy or idle.
    """

    def __init__(self, stall_s: float, spin_s: float, *, counts_work: bool) -> None:
        self._stall_s = stall_s
        self._spin_s = spin_s
        self._counts_work = counts_work
        self._pid = 0
        self._seen_s = 0.0
        self._pulse = Pulse(None)

    def has_stalled(self, pid: int, heard_s: float, now_s: float) -> bool:
        """Return whether process ``pid``, whose last report came at ``heard_s``, has stalled.

        Both times are on the caller's clock; the caller must call at least twice in ``stall_s``.
        """
        idle_s = self._idle_s(pid, heard_s, now_s)
        if not pid:
            return False
        return idle_s > self._stall_s or now_s - heard_s > self._spin_s

    def has_stalled_starting(self, pid: int, now_s: float) -> bool:
        """Return whether the starting process ``pid`` has done nothing since it was first seen."""
        idle_s = self._idle_s(pid, 0.0, now_s)
        return bool(pid) and min(idle_s, now_s - self._seen_s) > self._stall_s

    def _idle_s(self, pid: int, heard_s: float, now_s: float) -> float:
        """Return the time without reports and processor use, in seconds; 0 if not known."""
        if pid != self._pid:
            self._pid, self._seen_s = pid, now_s
            self._pulse = Pulse(pid if self._counts_work else None)
        if not self._counts_work:
            return 0.0
        idle_s = now_s - max(heard_s, self._pulse.last_worked_s(now_s, with_descendants=False))
        if idle_s > self._stall_s / 2:
            idle_s = now_s - max(heard_s, self._pulse.last_worked_s(now_s))
        return idle_s
