"""Instances that die, cannot be reached or are started by a parent that is gone."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm")

from banaserve import processes
from banaserve.clock import WallClock
from banaserve.engine.vllm import cluster as clusters
from banaserve.engine.vllm import instance as instances
from banaserve.engine.vllm.engine_settings import EngineSettings
from banaserve.engine.vllm.instance import Instance, State
from banaserve.engine.vllm.launch import forkserver, messages, spawned
from banaserve.engine.vllm.launch.devices import Devices
from banaserve.engine.vllm.launch.engine_main import Launch
from banaserve.engine.vllm.launch.launcher import ForkLauncher, SpawnLauncher
from banaserve.engine.vllm.launch.parent_link import ParentLink, ParentLostError
from banaserve.engine.vllm.launch.spawned import LaunchKind
from banaserve.errors import InstanceDeadError
from banaserve.processes import StallWatch, is_running
from banaserve.types import InstanceId, Role
from waiting import eventually, until

# ---- the launcher


class Parent:
    """Answers orders, each when it is told to, with the number of the order as process id."""

    def __init__(self, sock: socket.socket) -> None:
        self.orders = 0
        self.may_answer = threading.Semaphore(0)
        self._sock = sock
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while isinstance(order := messages.receive(self._sock), messages.StartEngine):
            self.orders += 1
            self.may_answer.acquire()
            messages.send(self._sock, messages.EngineStarted(order.instance_id, self.orders))
        self._sock.close()


async def none_other() -> ParentLink:
    raise ParentLostError("no engine parent can be started: no memory")


async def test_an_order_that_was_cancelled_takes_nobodys_answer(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    parent, launcher = Parent(theirs), ForkLauncher(ParentLink(ours, 0), none_other)
    first = asyncio.create_task(launcher.start("d0", "", tmp_path))
    await until(lambda: parent.orders == 1)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    second = asyncio.create_task(launcher.start("d1", "", tmp_path))
    await asyncio.sleep(0)
    parent.may_answer.release(2)
    assert await asyncio.wait_for(second, 30.0) == 2
    launcher.close()


async def test_a_parent_that_cannot_be_replaced_is_told_in_one_line(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    launcher = ForkLauncher(ParentLink(ours, 0), none_other)
    with pytest.raises(InstanceDeadError, match=r"no memory, and no other one .*: see front.log"):
        await launcher.start("d0", "", tmp_path)
    launcher.close()


async def test_a_parent_that_talks_nonsense_is_replaced(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    body = msgspec.msgpack.encode(messages.EngineStarted("d0", 1)).replace(b"d0", b"\xff0")
    theirs.sendall(struct.pack("!I", len(body)) + body)
    _, second = answering()

    async def start_parent() -> ParentLink:
        return second

    launcher = ForkLauncher(ParentLink(ours, 0), start_parent)
    assert await launcher.start("d0", "", tmp_path) == 1
    launcher.close()
    theirs.close()


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as started:
        yield started
        started.kill()


def answering(pid: int = 0) -> tuple[Parent, ParentLink]:
    """A parent that answers two orders at once."""
    ours, theirs = socket.socketpair()
    parent = Parent(theirs)
    parent.may_answer.release(2)
    return parent, ParentLink(ours, pid)


@pytest.mark.parametrize("is_hung", [False, True], ids=["ended", "hung"])
async def test_a_lost_parent_is_replaced_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    process: subprocess.Popen[bytes],
    is_hung: bool,
) -> None:
    ours, theirs = socket.socketpair()
    if is_hung:
        monkeypatch.setattr(ParentLink.order, "__defaults__", (0.05,))
    else:
        theirs.close()
    first, (parent, second) = ParentLink(ours, process.pid), answering()
    num_started = 0

    async def start_parent() -> ParentLink:
        nonlocal num_started
        num_started += 1
        monkeypatch.setattr(ParentLink.order, "__defaults__", (30.0,))
        return second

    launcher = ForkLauncher(first, start_parent)
    orders = (launcher.start(name, "", tmp_path) for name in ("d0", "d1"))
    assert sorted(await asyncio.gather(*orders)) == [1, 2]
    assert (num_started, parent.orders) == (1, 2)
    assert process.poll() is None, "it may have engines that are well"
    parent.may_answer.release()
    await launcher.start("d0", "", tmp_path)
    assert not is_running(process.pid), "it has none"
    launcher.close()
    theirs.close()


async def test_a_hung_parent_stays_while_it_has_engines(
    tmp_path: Path, process: subprocess.Popen[bytes]
) -> None:
    with subprocess.Popen(["sleep", "600"]) as engine:  # noqa: ASYNC220
        ours, theirs = socket.socketpair()
        first, (_, second) = ParentLink(ours, process.pid), answering()
        messages.send(theirs, messages.EngineStarted("d0", engine.pid))

        async def start_parent() -> ParentLink:
            return second

        launcher = ForkLauncher(first, start_parent)
        assert await launcher.start("d0", "", tmp_path) == engine.pid
        first.is_lost = True
        await launcher.start("d1", "", tmp_path)
        await launcher.start("d1", "", tmp_path)
        assert process.poll() is None
        engine.kill()
        engine.wait()
        await launcher._sweep()
        assert not is_running(process.pid)
        launcher.close()
        theirs.close()


def test_an_order_that_another_parent_has_got_since_is_not_obeyed() -> None:
    late = messages.StartEngine("d0", "", "", until_s=time.monotonic() - 1.0)
    assert forkserver._is_late(late)
    assert not forkserver._is_late(msgspec.structs.replace(late, until_s=time.monotonic() + 1e3))
    assert not forkserver._is_late(messages.StartEngine("d0", "", ""))


def test_a_stopped_child_is_ended_and_reaped(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGSTOP)
    ours, theirs = socket.socketpair()
    ParentLink(ours, process.pid, process).close(patience_s=0.01)
    theirs.close()
    assert process.returncode is not None


def test_what_is_spawned_says_nothing_on_its_command_line_and_ends_with_its_starter(
    tmp_path: Path,
) -> None:
    """Its starter is not this process: it must not come so far as to import an engine."""
    said = Launch("d0", ["--hf-token", "a-secret"], "ipc://nowhere", str(tmp_path / "log"))
    process = spawned.spawn(LaunchKind.ENGINE, said, os.environ)
    try:
        line = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        assert b"a-secret" not in line
        assert str(os.getpid()).encode() in line.split(b"\0")
    finally:
        process.kill()
        process.wait()
    command = [sys.executable, "-m", spawned.__name__, "engine", "1"]
    done = subprocess.run(command, input=b"nonsense", timeout=60.0)
    assert (done.returncode, (tmp_path / "log").exists()) == (1, False)


# ---- an instance


def instance(folder: Path, connect: Callable[[object], object]) -> Any:
    full = SimpleNamespace(num_tokens=64)
    parts: list[Any] = [
        SimpleNamespace(),  # configuration and Prometheus: for the real client only
        SpawnLauncher([], Devices({})),
        SimpleNamespace(),
        *(folder, folder, WallClock()),
        SimpleNamespace(of_role=lambda _: full),
    ]
    made: Any = Instance(InstanceId("x0"), Role.DECODE, *parts)
    made._connect = connect
    return made


async def test_an_engine_that_ends_before_it_is_connected_is_not_waited_for(
    tmp_path: Path, process: subprocess.Popen[bytes]
) -> None:
    never = threading.Event()
    made = instance(tmp_path, lambda _: never.wait())
    made.pid = process.pid
    connecting = asyncio.create_task(made._connected({}))
    await asyncio.sleep(0)
    process.kill()
    with pytest.raises(InstanceDeadError, match="instance x0 has ended"):
        await asyncio.wait_for(connecting, 30.0)
    never.set()
    made.kill()  # its process id is no longer its own


@pytest.mark.parametrize("awaited", ["weights", "budget"])
async def test_one_that_is_given_up_while_it_connects_does_not_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, awaited: str
) -> None:
    llm: Any = SimpleNamespace(
        engine_core=SimpleNamespace(
            resources=SimpleNamespace(engine_dead=False), _ensure_output_queue_task=int
        ),
        output_processor=SimpleNamespace(propagate_error=str, request_states={}),
        vllm_config=SimpleNamespace(cache_config=SimpleNamespace(num_gpu_blocks=1, block_size=16)),
        _run_output_handler=int,
        shutdown=lambda timeout: None,
    )
    made = instance(tmp_path, lambda _: llm)
    reached, may_go_on = asyncio.Event(), asyncio.Event()

    async def wait(*_: object) -> None:
        reached.set()
        await may_go_on.wait()

    async def at_once(*_: object) -> None: ...

    async def thread(work: Callable[[], object]) -> object:
        if awaited == "weights":
            await wait()
        return work()

    async def launched(*_: object) -> int:
        return 0

    async def connected(_: object) -> object:
        return llm

    monkeypatch.setattr(instances.processes, "in_daemon_thread", thread)
    monkeypatch.setattr(instances, "weights_of", lambda _: "w")
    made._launcher = SimpleNamespace(start=launched)
    made._until_ready, made._connected = at_once, connected
    made.settings = EngineSettings(made.settings.config, made.settings.budgets)
    made.take_budget = wait if awaited == "budget" else at_once
    starting = asyncio.create_task(made.start(1.0))
    await asyncio.wait_for(reached.wait(), 30.0)
    made.mark_dead()
    may_go_on.set()
    with pytest.raises(InstanceDeadError, match="x0 was ended while starting"):
        await starting
    assert (made.state, made.llm) == (State.DEAD, None)


# ---- the cluster


class Mortal:
    """An instance whose ``starts`` are errors or None."""

    def __init__(self, *starts: Exception | None) -> None:
        self.id, self.role, self.state = InstanceId("x1"), Role.DECODE, State.STARTING
        self.has_lost_client = self.is_held = self.is_leaving = False
        self.pid = self.num_kills = self.num_probes = 0
        self.report: Any = None
        self.llm = object()
        self.dying, self.ended = asyncio.Event(), asyncio.Event()
        self._given_back = asyncio.Event()
        self._given_back.set()
        self._starts = list(starts)

    async def start(self, _: float) -> None:
        error = self._starts.pop(0)
        if error is not None:
            raise error
        self.dying.clear()
        self.ended.clear()
        self.has_lost_client = False
        self.report = None
        self.state = State.READY

    @property
    def takes_requests(self) -> bool:
        return self.state is State.READY

    async def wait_dying(self) -> None:
        await self.dying.wait()

    async def wait_ended(self) -> None:
        await self.ended.wait()

    def giving_back(self) -> Any:
        return Instance.giving_back(self)  # type: ignore[arg-type]

    def last_words(self) -> str:
        return "nothing"

    def mark_dead(self, state: State = State.DEAD) -> None:
        self.state = state

    def kill(self) -> None:
        self.num_kills += 1
        self.end()

    def end(self) -> None:
        self.dying.set()
        self.ended.set()

    def view(self) -> Any:
        return SimpleNamespace(report=self.report)

    async def probe(self, _: float) -> None:
        self.num_probes += 1
        raise RuntimeError("an answer that makes no sense")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = functools.partial(clusters.RestartPolicy, first_s=0.001)
    monkeypatch.setattr(clusters, "RestartPolicy", policy)
    monkeypatch.setattr(clusters, "_PROBE_INTERVAL_S", 0.001)


def cluster_of(
    *mortals: Mortal, stall_s: float = 600.0, retry_s: float = 600.0
) -> clusters.Cluster:
    nothing: Any = None
    instances: Any = mortals
    patience = clusters.ClusterTimeouts(1.0, 1.0, stall_s, retry_s=retry_s)
    return clusters.Cluster(instances, nothing, WallClock(), patience)


@pytest.mark.usefixtures("quick")
async def test_nothing_ends_the_watch_over_an_instance() -> None:
    mortal = Mortal(None, OSError(24, "too many open files"), InstanceDeadError("no"), None)
    cluster = cluster_of(mortal)
    told = []

    def fail(_: InstanceId) -> None:
        raise ValueError("what follows fails")

    cluster.on_ended += [fail, told.append]
    await cluster.start(lambda _: None)
    await until(lambda: mortal.num_probes > 1)
    mortal.end()
    await until(lambda: not mortal._starts)
    assert (mortal.state, told, mortal.num_kills) == (State.READY, ["x1"], 2)
    await cluster.stop()


@pytest.mark.usefixtures("quick")
async def test_an_instance_that_is_removed_is_not_started_again() -> None:
    mortal, told = Mortal(None, None), []
    cluster = cluster_of(mortal)
    cluster.on_ended.append(told.append)
    await cluster.start(lambda _: None)
    await cluster.remove(mortal.id)
    assert (mortal.state, told, mortal._starts) == (State.DEAD, ["x1"], [None])
    assert (cluster.instances, cluster.has_left_decode(mortal.id)) == ({}, True)
    with pytest.raises(InstanceDeadError, match="x1 has been removed"):
        cluster.instance(mortal.id)
    await cluster.stop()


@pytest.mark.usefixtures("quick")
async def test_an_instance_that_is_removed_while_it_starts_again_ends() -> None:
    starting, may_start = asyncio.Event(), asyncio.Event()

    class Slow(Mortal):
        async def start(self, _: float) -> None:
            if len(self._starts) == 1:
                starting.set()
                await may_start.wait()
            await super().start(_)

    mortal = Slow(None, None)
    cluster = cluster_of(mortal)
    await cluster.start(lambda _: None)
    mortal.kill()
    await starting.wait()
    removing = asyncio.create_task(cluster.remove(mortal.id))
    await until(lambda: not cluster.instances)
    may_start.set()
    await asyncio.wait_for(removing, 30.0)
    assert (mortal._starts, mortal.ended.is_set()) == ([], True)
    assert mortal.state is not State.READY
    await cluster.stop()


@pytest.mark.usefixtures("quick")
async def test_an_instance_that_is_added_is_kept_alive() -> None:
    mortal, other = Mortal(None), Mortal(None, None)
    other.id = InstanceId("x2")
    cluster = cluster_of(mortal)
    await cluster.start(lambda _: None)
    added: Any = other
    await other.start(1.0)
    cluster.adopt(added)
    other.kill()
    await until(lambda: other._starts == [] and other.state is State.READY)
    assert sorted(one.id for one in await cluster.taking()) == ["x1", "x2"]
    await cluster.stop()


@pytest.mark.usefixtures("quick")
async def test_streams_go_on_before_the_memory_of_a_dead_instance_is_free() -> None:
    mortal = Mortal(None, None)
    cluster, told = cluster_of(mortal), []
    cluster.on_ended.append(told.append)
    await cluster.start(lambda _: None)
    mortal.dying.set()
    await until(lambda: mortal.state is State.DEAD)
    assert (told, len(mortal._starts), mortal._given_back.is_set()) == ([], 1, False)
    mortal.ended.set()
    await until(lambda: not mortal._starts)
    assert mortal._given_back.is_set()
    assert (mortal.state, told) == (State.READY, ["x1"])
    await cluster.stop()


@pytest.mark.usefixtures("quick")
async def test_an_instance_without_a_client_is_started_again() -> None:
    mortal = Mortal(None, None)
    cluster = cluster_of(mortal)
    await cluster.start(lambda _: None)
    mortal.has_lost_client = True
    await until(lambda: not mortal._starts)
    assert (mortal.state, mortal.num_kills > 0) == (State.READY, True)
    await cluster.stop()


@pytest.mark.usefixtures("quick")
async def test_an_instance_that_stands_still_is_started_again(
    process: subprocess.Popen[bytes],
) -> None:
    mortal = Mortal(None, None)
    cluster = cluster_of(mortal, stall_s=0.05)
    await cluster.start(lambda _: None)
    mortal.pid, mortal.report = process.pid, SimpleNamespace(at_s=WallClock().now() - 1e6)
    await until(lambda: not mortal._starts)
    assert (mortal.state, mortal.num_kills > 0) == (State.READY, True)
    await cluster.stop()


@pytest.mark.usefixtures("quick")
async def test_an_instance_that_stands_still_while_it_starts_is_ended(
    process: subprocess.Popen[bytes],
) -> None:
    class Slow(Mortal):
        """Its second start ends when it is killed."""

        async def start(self, _: float) -> None:
            if len(self._starts) == 2:
                self.state, self.pid = State.STARTING, process.pid
                self.ended.clear()
                await self.ended.wait()
            await super().start(_)

    mortal = Slow(None, InstanceDeadError("killed"), None)
    cluster = cluster_of(mortal, stall_s=0.05)
    await cluster.start(lambda _: None)
    mortal.end()
    await until(lambda: not mortal._starts)
    assert mortal.state is State.READY
    await cluster.stop()


def never_again(*_: object) -> InstanceDeadError:
    return InstanceDeadError("no memory")


@pytest.mark.usefixtures("quick")
async def test_an_instance_that_was_given_up_is_tried_again() -> None:
    mortal = Mortal(None, *map(never_again, range(8)), None)
    other = Mortal(None)
    other.id = InstanceId("x2")
    cluster = cluster_of(mortal, other, retry_s=0.01)
    await cluster.start(lambda _: None)
    mortal.end()
    await until(lambda: not mortal._starts)
    assert mortal.state is State.READY
    assert not cluster.failed.is_set(), "the other one has served all the time"
    await cluster.stop()


@pytest.mark.usefixtures("quick")
async def test_a_cluster_whose_instances_are_all_given_up_has_failed() -> None:
    mortal = Mortal(None, *map(never_again, range(5)))
    cluster = cluster_of(mortal, retry_s=1e6)
    await cluster.start(lambda _: None)
    assert (cluster.is_healthy, cluster.failed.is_set()) == (True, False)
    mortal.end()
    async with asyncio.timeout(30.0):
        await cluster.failed.wait()
    assert (cluster.is_healthy, cluster.last_failure) == (False, "no memory")
    removing = asyncio.create_task(cluster.remove(mortal.id))
    await asyncio.wait_for(removing, 30.0)
    await cluster.stop()


async def test_a_server_is_healthy_until_nothing_has_served_for_a_while() -> None:
    class Clock(WallClock):
        at_s = 0.0

        def now(self) -> float:
            return self.at_s

    mortals = [Mortal(), Mortal()]
    mortals[0].role, mortals[1].id = Role.PREFILL, InstanceId("x2")
    clock, nothing = Clock(), SimpleNamespace()
    instances: Any = mortals
    cluster = clusters.Cluster(instances, nothing, clock, clusters.ClusterTimeouts(unserved_s=10.0))
    for mortal in mortals:
        mortal.state = State.READY
    clock.at_s = 100.0
    assert cluster.is_healthy
    mortals[0].state = State.DEAD
    clock.at_s = 109.0
    assert cluster.is_healthy
    clock.at_s = 110.5
    assert not cluster.is_healthy
    mortals[0].state = State.READY
    assert cluster.is_healthy


@pytest.mark.usefixtures("quick")
async def test_an_engine_is_well_after_this_process_has_stood_still(
    process: subprocess.Popen[bytes],
) -> None:
    """All that it said before is old then; asked once, it answers."""

    class Answering(Mortal):
        async def probe(self, _: float) -> None:
            self.num_probes += 1
            self.report = SimpleNamespace(at_s=WallClock().now() + 1e6)

    mortal = Answering(None, None)
    cluster = cluster_of(mortal, stall_s=0.05)
    await cluster.start(lambda _: None)
    mortal.pid, mortal.report = process.pid, SimpleNamespace(at_s=WallClock().now() - 1e6)
    await until(lambda: mortal.num_probes > 0)
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert (mortal.num_kills, mortal.state) == (0, State.READY)
    await cluster.stop()


def test_only_silence_without_work_is_a_stall(process: subprocess.Popen[bytes]) -> None:
    working = os.getpid()
    watch = StallWatch(10.0, 1e9, counts_work=True)
    assert not watch.has_stalled(process.pid, 0.0, 10.0)
    assert watch.has_stalled(process.pid, 0.0, 10.1)
    assert not watch.has_stalled(process.pid, 5.0, 15.0)
    assert watch.has_stalled(working, 0.0, 20.0)  # seen for the first time
    use_a_tick()
    assert not watch.has_stalled(working, 0.0, 25.0)
    assert watch.has_stalled(process.pid, 0.0, 26.0)
    use_a_tick()
    assert not watch.has_stalled(0, 0.0, 1e6)


def test_work_without_a_word_is_a_stall_in_the_end(process: subprocess.Popen[bytes]) -> None:
    watch = StallWatch(10.0, 100.0, counts_work=True)
    working = os.getpid()
    assert not watch.has_stalled(working, 90.0, 94.0)
    for now_s in (95.0, 99.0, 101.0):
        use_a_tick()
        assert watch.has_stalled(working, 0.0, now_s) is (now_s > 100.0)
    assert not watch.has_stalled(working, 95.0, 101.0)
    on_gpu = StallWatch(10.0, 100.0, counts_work=False)
    assert not on_gpu.has_stalled(process.pid, 0.0, 99.0), "it may wait for its device"
    assert on_gpu.has_stalled(process.pid, 0.0, 101.0)


def test_one_that_waits_for_a_compiler_does_not_stand_still() -> None:
    spins = "import os; os.read(0, 1)\nwhile True: pass"
    waits = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {spins!r}])"
    with subprocess.Popen([sys.executable, "-c", waits], stdin=subprocess.PIPE) as engine:
        assert engine.stdin is not None
        eventually(lambda: len(children_of(engine.pid)) == 1)
        (compiler,) = children_of(engine.pid)
        quick, slow = (StallWatch(10.0, 1e9, counts_work=True) for _ in range(2))
        engine.send_signal(signal.SIGSTOP)
        quick.has_stalled(engine.pid, 0.0, 6.0)
        engine.stdin.write(b"x")
        engine.stdin.flush()
        began = ticks_of(compiler)
        eventually(lambda: ticks_of(compiler) > began + 2)
        assert not quick.has_stalled(engine.pid, 0.0, 12.0), "its compiler works"
        os.kill(compiler, signal.SIGKILL)
        eventually(lambda: not is_running(compiler))
        slow.has_stalled(engine.pid, 0.0, 6.0)
        assert slow.has_stalled(engine.pid, 0.0, 17.0)
        engine.kill()


def children_of(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def ticks_of(pid: int) -> int:
    return processes._ticks(Path(f"/proc/{pid}/stat"))


def test_one_that_starts_is_watched_from_when_it_is_first_seen(
    process: subprocess.Popen[bytes],
) -> None:
    watch = StallWatch(10.0, 20.0, counts_work=True)
    assert not watch.has_stalled_starting(process.pid, 1000.0)
    assert not watch.has_stalled_starting(process.pid, 1010.0)
    assert watch.has_stalled_starting(process.pid, 1010.1)
    assert not watch.has_stalled_starting(0, 1e6)
    working = os.getpid()
    assert not watch.has_stalled_starting(working, 2000.0)
    for now_s in (2009.0, 2018.0, 2027.0):
        use_a_tick()
        assert not watch.has_stalled_starting(working, now_s)
    assert not StallWatch(1.0, 2.0, counts_work=False).has_stalled_starting(process.pid, 9e9)


def use_a_tick() -> None:
    began_s = time.process_time()
    while time.process_time() - began_s < 3 / os.sysconf("SC_CLK_TCK"):
        pass
