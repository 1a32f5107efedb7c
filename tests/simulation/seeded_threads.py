"""Threads of the processes of a virtual machine: one runs at a time, and waiting is virtual.

Code that blocks runs unchanged on them: ``threading``, ``time`` and ``select`` of its module are
replaced by ``Threading``, ``Time`` and ``Select``. Each is a greenlet that has the word only
between ``_enter`` and the next wait, so a seed runs the same way again; threads of the system
would do so too, and take longer to hand the word on than to do their work.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import select
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, ClassVar, Protocol

from greenlet import getcurrent, greenlet

from banaserve.transport.errors import PeerGoneError, TransferTimeoutError
from banaserve.transport.interface import Message, Tensor


class Owner(Protocol):
    """The process of a thread; see ``seeded_machine.Process``.

    Attributes:
        parked: Threads that are due while it stands still.
        threads: That have not ended.
    """

    pid: int
    may_go_on: asyncio.Event
    parked: list[Thread]
    threads: list[Thread]


class KilledError(BaseException):
    """Unwinds a thread whose process is dead; what it tries on the way has no effect."""


class _Running:
    thread: Thread | None = None


def current() -> Thread:
    """The thread that has the word."""
    assert _Running.thread is not None, "only threads of the machine may wait"
    return _Running.thread


class Thread:
    """One thread of a process.

    Attributes:
        result: What its work has returned.
        failure: What it has raised.
        ended: Set when it has ended.
    """

    def __init__(self, owner: Owner, work: Callable[[], Any]) -> None:
        self.loop = asyncio.get_running_loop()
        self.owner = owner
        self.result: Any = None
        self.failure: BaseException | None = None
        self.ended = asyncio.Event()
        self.is_killed = False
        self._work = work
        self._joining: list[Thread] = []
        self._is_due = self._was_woken = False
        self._greenlet = greenlet(self._run)

    def start(self) -> None:
        self.owner.threads.append(self)
        self._due(woken=True)

    def join(self, timeout_s: float | None = None) -> None:
        """Wait, on another thread, until it has ended."""
        if not self.ended.is_set():
            wait(self._joining, timeout_s)

    def kill(self) -> None:
        """End it where it is."""
        if self.ended.is_set() or self.is_killed:
            return
        self.is_killed = True
        if _Running.thread is not self:
            self._enter()

    # ---- on the thread

    def _run(self) -> None:
        try:
            if not self.is_killed:
                self.result = self._work()
        except KilledError:
            pass
        except BaseException as failure:
            self.failure = failure
        self.owner.threads.remove(self)
        self.ended.set()
        wake(self._joining)

    def pause(self) -> bool:
        """Give the word away until it is due again; whether it was woken."""
        if not self.is_killed:
            self._greenlet.parent.switch()
        if self.is_killed:
            raise KilledError
        return self._was_woken

    # ---- on whatever has the word

    def _due(self, *, woken: bool) -> None:
        if not self._is_due and not self.is_killed:
            self._is_due, self._was_woken = True, woken
            self.loop.call_soon(self.go_on)

    def go_on(self) -> None:
        """Give it the word, now or when its process goes on."""
        if self.is_killed or self.ended.is_set():
            return
        if not self.owner.may_go_on.is_set():
            self.owner.parked.append(self)
            return
        self._is_due = False
        self._enter()

    def _enter(self) -> None:
        before, _Running.thread = _Running.thread, self
        self._greenlet.parent = getcurrent()
        self._greenlet.switch()
        _Running.thread = before


def wait(waiting: list[Thread], timeout_s: float | None = None) -> bool:
    """Wait until ``wake`` is called with the same list; False where time is up before."""
    thread = current()
    if thread.is_killed:
        raise KilledError
    timer = None
    if timeout_s is not None:
        timer = thread.loop.call_later(max(0.0, timeout_s), lambda: thread._due(woken=False))
    waiting.append(thread)
    try:
        return thread.pause()
    finally:
        if timer is not None:
            timer.cancel()
        if thread in waiting:
            waiting.remove(thread)


def wake(waiting: list[Thread]) -> None:
    """Let all go on that wait with this list."""
    for thread in waiting:
        thread._due(woken=True)
    waiting.clear()


# ---- what stands in for modules


class _Lock:
    """Of threads of the machine; its owner may take it again."""

    def __init__(self) -> None:
        self._owner: Thread | None = None
        self._count = 0
        self._waiting: list[Thread] = []

    def acquire(self, blocking: bool = True) -> bool:
        thread = current()
        while self._owner not in (None, thread):
            if not blocking:
                return False
            wait(self._waiting)
        self._owner = thread
        self._count += 1
        return True

    def release(self) -> None:
        self._count -= 1
        if not self._count:
            self._owner = None
            wake(self._waiting)

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class _Event:
    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        self._is_set = True

    def is_set(self) -> bool:
        return self._is_set


def _thread(*, target: Callable[[], None], name: str, daemon: bool) -> Thread:
    assert daemon, f"{name} would keep its process"
    return Thread(current().owner, target)


Threading = SimpleNamespace(Thread=_thread, Lock=_Lock, RLock=_Lock, Event=_Event)


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def sleep(seconds: float) -> None:
    """Wait on a thread of the machine."""
    wait([], seconds)


Time = SimpleNamespace(perf_counter=_now_s, monotonic=_now_s, sleep=sleep)


# ---- channels


class VirtualChannel:
    """One end of a connection between two processes; see ``StreamChannel``."""

    _numbers: ClassVar[dict[int, VirtualChannel]] = {}

    def __init__(self, owner: Owner, draws: random.Random) -> None:
        self.min_epoch = 0
        self.num_refused = 0
        self._owner = owner
        self._draws = draws
        self._peer: VirtualChannel | None = None
        self._arrived: list[Message] = []
        self._waiting: list[Thread] = []
        self._last_s = 0.0
        self._is_closed = self._is_peer_gone = False
        self._numbers[id(self)] = self

    @classmethod
    def pair(
        cls, one: Owner, other: Owner, draws: random.Random
    ) -> tuple[VirtualChannel, VirtualChannel]:
        first, second = cls(one, draws), cls(other, draws)
        first._peer, second._peer = second, first
        return first, second

    @property
    def owner(self) -> Owner:
        return self._owner

    def fileno(self) -> int:
        return id(self)

    def has_pending(self) -> bool:
        return False

    @property
    def is_readable(self) -> bool:
        return bool(self._arrived) or self._is_peer_gone

    def send(self, message: Message, timeout_s: float) -> None:
        if current().is_killed:
            raise KilledError
        if self._is_closed or self._is_peer_gone:
            raise PeerGoneError("the channel is closed")
        tensors = tuple(Tensor(one.dtype, one.shape, one.data.copy()) for one in message.tensors)
        sent = Message(message.body, tensors, message.epoch)
        assert self._peer is not None
        self._later(self._peer._arrive, sent)

    def receive(self, timeout_s: float) -> Message:
        until_s = _now_s() + timeout_s
        while True:
            if self._is_closed:
                raise PeerGoneError("the channel is closed")
            while self._arrived:
                message = self._arrived.pop(0)
                if message.epoch >= self.min_epoch:
                    return message
                self.num_refused += 1
            if self._is_peer_gone:
                raise PeerGoneError("the peer has closed the connection")
            left_s = until_s - _now_s()
            if left_s <= 0:
                raise TransferTimeoutError("nothing in time")
            wait(self._waiting, left_s)

    def close(self) -> None:
        """Close this end, on a thread or where its process has ended."""
        if not self._is_closed:
            self._is_closed = True
            self._numbers.pop(id(self), None)
            assert self._peer is not None
            self._later(self._peer._lose)
            wake(self._waiting)

    def _later(self, act: Callable[..., None], *args: Any) -> None:
        """Over the wire, in order."""
        loop = asyncio.get_running_loop()
        self._last_s = max(self._last_s, loop.time() + self._draws.uniform(0.0, 0.002))
        loop.call_at(self._last_s, act, *args)

    def _arrive(self, message: Message) -> None:
        if not self._is_closed:
            self._arrived.append(message)
            wake(self._waiting)

    def _lose(self) -> None:
        self._is_peer_gone = True
        wake(self._waiting)


class _Poll:
    def __init__(self) -> None:
        self._channels: list[VirtualChannel | None] = []

    def register(self, number: int, _: int) -> None:
        self._channels.append(VirtualChannel._numbers.get(number))

    def poll(self, _: float) -> list[VirtualChannel]:
        return [one for one in self._channels if one is not None and one.is_readable]


Select = SimpleNamespace(poll=_Poll, POLLIN=select.POLLIN, POLLHUP=select.POLLHUP)


@contextlib.contextmanager
def on_thread(owner: Owner, work: Callable[[], Any]) -> Iterator[Thread]:
    """A thread that runs ``work``, until the caller waits no more for it."""
    thread = Thread(owner, work)
    thread.start()
    try:
        yield thread
    finally:
        thread.kill()


async def run_on_thread(owner: Owner, work: Callable[[], Any]) -> Any:
    """What ``work`` returns, which may wait."""
    with on_thread(owner, work) as thread:
        await thread.ended.wait()
    if thread.failure is not None:
        raise thread.failure
    return thread.result
