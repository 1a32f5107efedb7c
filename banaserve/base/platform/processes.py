"""Processes, which may be no children of this one, and threads that may outlive an event loop."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import gc
import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

T = TypeVar("T")
logger = logging.getLogger(__name__)
_PR_SET_NAME = 15
_PR_SET_PDEATHSIG = 1
_PIDFD_THREAD = os.O_EXCL
_AGAIN_S = 0.5
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
    waited for. Nothing is collected meanwhile: a vLLM client that was not closed would wait for its
    sockets forever.
    """
    gc.disable()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


async def wait_ended(pid: int) -> None:
    """Return when process ``pid`` has ended; at once if there is no such process."""
    await _wait_any(lambda: [os.pidfd_open(pid)])


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
    await _wait_any(lambda: [os.pidfd_open(pid), *_open_life(pid)])


def _open_life(pid: int) -> list[int]:
    """Return descriptors of the threads that ``show_life`` has started in process ``pid``."""
    found: list[int] = []
    with contextlib.suppress(OSError):  # the process has ended meanwhile
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # it has ended, or there are no thread pidfds
                if (thread / "comm").read_text().strip() == _LIFE:
                    found.append(os.pidfd_open(int(thread.name), _PIDFD_THREAD))
    return found


async def _wait_any(open_all: Callable[[], list[int]]) -> None:
    """Return when a descriptor that ``open_all`` opens is readable, or its process is gone."""
    while True:
        try:
            descriptors = open_all()
        except ProcessLookupError:
            return
        except OSError as error:  # a live process must not count as ended
            logger.warning("no descriptor to wait for a process with: %s", error)
            await asyncio.sleep(_AGAIN_S)
        else:
            break
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


def spawn_module(
    module: str,
    arguments: Sequence[str],
    said: bytes,
    environment: Mapping[str, str],
    *,
    pass_fds: Sequence[int] = (),
    in_session: bool = False,
    output: int | None = None,
) -> subprocess.Popen[bytes]:
    """Start ``python -m module ARGUMENTS...``, which reads ``said`` from its standard input.

    Every user of the machine can see command lines, and ``said`` may contain secrets. If the
    process is to die with its parent, call this from a thread that lives as long as the process
    should.

    Args:
        in_session: True if the process stays in this process's session.
        output: Descriptor for the process's output; None for that of this process.

    Raises:
        OSError: The system has no resources for another process.
    """
    command = [sys.executable, "-m", module, *arguments]
    memory = os.memfd_create("launch")
    try:
        with os.fdopen(os.dup(memory), "wb") as writer:
            writer.write(said)
        os.lseek(memory, 0, os.SEEK_SET)
        return subprocess.Popen(
            command,
            stdin=memory,
            stdout=output,
            stderr=output,
            env=dict(environment),
            pass_fds=pass_fds,
            start_new_session=not in_session,
        )
    finally:
        os.close(memory)
