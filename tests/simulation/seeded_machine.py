"""A machine in virtual time: processes that start, stall and die at moments drawn from a seed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any, TypeVar

import msgspec
import zmq

from banaserve.base.errors import InstanceDeadError
from banaserve.migration.rpc.messages import GuestAddress
from banaserve.serving.launch.launcher import Launcher
from banaserve.serving.launch.messages import Order, StartEngine
from banaserve.sim.timeline import Timeline
from seeded_threads import Thread, run_on_thread
from virtual_time import VirtualTimeLoop

T = TypeVar("T")
FIRST_PID = 10_000_000
"""More than Linux gives: nothing that is asked of one of these concerns a real process."""


class Loop(VirtualTimeLoop):
    """An event loop in virtual time that runs the work of threads at once."""

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> Any:
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as failure:
            future.set_exception(failure)
        return future


def run_virtually(main: Coroutine[Any, Any, T]) -> T:
    """Run ``main`` in virtual time.

    Raises:
        RuntimeError: It waits for what never happens.
    """
    with asyncio.Runner(loop_factory=lambda: Loop(Timeline())) as runner:
        return runner.run(main)


class LoopClock:
    """The ``Clock`` of the running event loop."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class Troubles:
    """What goes wrong, until it is over.

    Attributes:
        draws: Of all that happens by chance, also where nothing goes wrong.
    """

    def __init__(self, draws: random.Random) -> None:
        self.draws = draws
        self.are_over = False
        self._rate = draws.choice([0.0, 0.5, 1.0, 2.0])

    def happen(self, probability: float) -> bool:
        """Whether one does that has this probability in a run of usual trouble."""
        return not self.are_over and self.draws.random() < probability * self._rate

    def some_s(self, most_s: float) -> float:
        return self.draws.uniform(0.0, most_s)


class Process:
    """A process of an engine or a guest.

    Attributes:
        dying: Set when it does nothing any more.
        ended: Set when nothing is left of it.
        may_go_on: Cleared while it stands still.
        engine: What runs in it.
        threads: Of its own, that have not ended.
        parked: Of them, those that are due while it stands still.
    """

    def __init__(self, pid: int, engine: Any) -> None:
        self.pid, self.engine = pid, engine
        self.dying, self.ended = asyncio.Event(), asyncio.Event()
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()
        self.threads: list[Thread] = []
        self.parked: list[Thread] = []
        self.task: asyncio.Task[None] | None = None

    def stop(self) -> None:
        """Let it stand still from here on."""
        self.may_go_on.clear()

    def go_on(self) -> None:
        """Let it go on where it stands still."""
        self.may_go_on.set()
        due, self.parked = self.parked, []
        for thread in due:
            thread.go_on()


class HandshakeSocket:
    """The socket at which a new engine says that it is there."""

    def __init__(self, addresses: dict[str, HandshakeSocket]) -> None:
        self.came: asyncio.Queue[tuple[bytes, bytes]] = asyncio.Queue()
        self.answered = asyncio.Event()
        self._addresses = addresses
        self._address = ""

    def setsockopt(self, *_: object) -> None: ...

    def bind(self, address: str) -> None:
        assert address not in self._addresses
        self._address = address
        self._addresses[address] = self

    async def recv_multipart(self) -> tuple[bytes, bytes]:
        return await self.came.get()

    async def send_multipart(self, _: object) -> None:
        self.answered.set()

    def say(self, status: str) -> None:
        self.came.put_nowait((b"engine", msgspec.msgpack.encode({"status": status})))

    def close(self) -> None:
        del self._addresses[self._address]


class Machine(Launcher):
    """Starts processes and ends them; stands in for ``os``, ``zmq`` and ``platform.processes``.

    Args:
        make: Makes the engine of an instance, with the options that it is started with.

    Attributes:
        num_deaths: Of engines that served or were starting; ``num_guest_deaths`` of guests.
        make_guest: Makes what runs in a guest, from its address and its host's options.
        on_dying: Called with each process that dies.
        failures: Of engines that found something wrong.
        sockets: Of handshakes under way, by address.
        delay_s: Of a message from an engine.
        broken_until_s: When instances can be started again that cannot be started.
    """

    def __init__(
        self, troubles: Troubles, make: Callable[[str, tuple[str, ...]], Any], die_in_s: float
    ) -> None:
        self.processes: dict[int, Process] = {}
        self.num_deaths = self.num_guest_deaths = 0
        self.make_guest: Callable[[GuestAddress, tuple[str, ...]], Any] | None = None
        self.on_dying: Callable[[Process], None] = lambda _: None
        self.failures: list[BaseException] = []
        self.sockets: dict[str, HandshakeSocket] = {}
        self.last_death_s: list[float] = []
        self._troubles = troubles
        self._make = make
        self._die_in_s = die_in_s
        self.delay_s = troubles.some_s(0.1)
        self.broken_until_s = dict[str, float]()
        context = SimpleNamespace(socket=lambda _: HandshakeSocket(self.sockets), term=lambda: None)
        self.zmq = SimpleNamespace(
            asyncio=SimpleNamespace(Context=lambda: context),
            SocketType=zmq.SocketType,
            SocketOption=zmq.SocketOption,
        )
        self.os = SimpleNamespace(kill=lambda pid, _: self.kill(pid))

    # ---- the launcher

    async def start(self, order: Order) -> int:
        await asyncio.sleep(self._troubles.some_s(0.1))
        if self._troubles.happen(0.05):
            raise InstanceDeadError("the engine parent is lost")
        pid = FIRST_PID + len(self.processes)
        run: Coroutine[Any, Any, None]
        if isinstance(order, StartEngine):
            process = Process(pid, self._make(order.instance_id, order.vllm_argv))
            run = self._run(process, order.handshake_address)
        else:
            assert self.make_guest is not None
            process = Process(pid, self.make_guest(order.address, order.vllm_argv))
            run = run_on_thread(process, process.engine.main)
        self.processes[pid] = process
        process.task = asyncio.create_task(run)
        process.task.add_done_callback(self._note)
        return process.pid

    def close(self) -> None:
        raise AssertionError("the run ends its processes itself")

    async def _run(self, process: Process, address: str) -> None:
        loop, loads_s = asyncio.get_running_loop(), self._troubles.some_s(2.0)
        await asyncio.sleep(loads_s)
        is_broken = self.broken_until_s.get(process.engine.name, 0.0) > loop.time()
        if is_broken or self._troubles.happen(0.1):
            self.kill(process.pid)
        if self._troubles.happen(0.05):
            process.stop()
        await process.may_go_on.wait()
        if (socket := self.sockets.get(address)) is None:
            return  # its instance has given up waiting
        socket.say("HELLO")
        await socket.answered.wait()
        await asyncio.sleep(loads_s)
        socket.say("READY")
        await process.engine.run(process)

    def _note(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (failure := task.exception()) is not None:
            self.failures.append(failure)

    # ---- the system

    def kill(self, pid: int) -> None:
        process = self.processes.get(pid)
        if process is None or process.ended.is_set():
            raise ProcessLookupError
        if process.dying.is_set():
            return
        process.dying.set()
        assert process.task is not None
        process.task.cancel()
        for thread in list(process.threads):
            thread.kill()
        self.on_dying(process)
        process.engine.die()
        loop = asyncio.get_running_loop()
        if self.is_guest(process):
            self.num_guest_deaths += 1
        else:
            self.num_deaths += 1
            self.last_death_s.append(loop.time())
        loop.call_later(self._troubles.some_s(self._die_in_s), self._end, process)

    @staticmethod
    def _end(process: Process) -> None:
        process.engine.end()
        process.ended.set()

    async def wait_dying(self, pid: int) -> None:
        if (process := self.processes.get(pid)) is not None:
            await process.dying.wait()

    async def wait_ended(self, pid: int) -> None:
        if (process := self.processes.get(pid)) is not None:
            await process.ended.wait()

    def in_daemon_thread(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """What takes a moment, and goes on where nobody waits for it any more."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def end() -> None:
            if future.done():
                return
            try:
                future.set_result(work())
            except TimeoutError as failure:
                future.set_exception(failure)

        loop.call_later(self._troubles.some_s(0.2), end)
        return future

    # ---- what a test asks

    @property
    def living(self) -> list[Process]:
        """Engines."""
        return [one for one in self._alive if not self.is_guest(one)]

    @property
    def guests(self) -> list[Process]:
        return [one for one in self._alive if self.is_guest(one)]

    @property
    def _alive(self) -> list[Process]:
        return [one for one in self.processes.values() if not one.dying.is_set()]

    @staticmethod
    def is_guest(process: Process) -> bool:
        return hasattr(process.engine, "main")

    def is_stopped(self, pid: int) -> bool:
        """See ``process_stats.is_stopped``."""
        process = self.processes.get(pid)
        return process is not None and not process.may_go_on.is_set()
