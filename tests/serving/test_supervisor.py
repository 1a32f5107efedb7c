"""Instances that die, stall or are removed: what ends, and what is started again."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import model_shapes
from banaserve.base.clock import WallClock
from banaserve.base.errors import InstanceDeadError
from banaserve.base.platform.run_dir import RunDir
from banaserve.base.types import InstanceId, Role
from banaserve.serving.instances import instance as instances
from banaserve.serving.instances import probe, supervisor
from banaserve.serving.instances.cluster import Cluster
from banaserve.serving.instances.instance import Instance, State
from banaserve.serving.instances.lasting_calls import LastingCalls
from banaserve.serving.instances.probe import ClusterTimeouts
from banaserve.serving.instances.service_state import ServiceState
from banaserve.serving.launch.devices import Devices
from banaserve.serving.launch.engine_settings import EngineSettings
from banaserve.serving.launch.launcher import InstancePlace, SpawnLauncher
from waiting import until


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as started:
        yield started
        started.kill()


def instance(folder: Path, connect: Callable[[object], object]) -> Any:
    full = SimpleNamespace(num_tokens=64)
    budgets: Any = SimpleNamespace(of_role=lambda _: full)
    nothing: Any = SimpleNamespace()  # configuration: for the real client only
    series: Any = SimpleNamespace(engine_ended=lambda _: None)
    settings = EngineSettings(nothing, budgets)
    run = RunDir(folder, folder)
    parts = (settings, SpawnLauncher([], Devices({})), series, run, WallClock(), LastingCalls())
    made: Any = Instance(InstanceId("x0"), Role.DECODE, *parts)
    made._connect = connect
    return made


async def test_an_engine_that_ends_before_it_is_connected_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process: subprocess.Popen[bytes]
) -> None:
    never = threading.Event()
    starting: list[str] = []

    def connect(_: object) -> None:
        assert not starting, "others may start now"
        process.kill()
        never.wait()

    @contextlib.asynccontextmanager
    async def turn_to_start(name: str) -> AsyncIterator[None]:
        starting.append(name)
        yield
        starting.remove(name)

    async def at_once(*_: object) -> None:
        assert starting == ["x0"], "it measures the memory of its GPU"

    async def launched(*_: object) -> int:
        return process.pid

    monkeypatch.setattr(instances, "startup_handshake", at_once)
    monkeypatch.setattr(instances, "weights_of", lambda _: "w")
    made = instance(tmp_path, connect)
    made._launcher = SimpleNamespace(
        start=launched,
        turn_to_start=turn_to_start,
        address_there=lambda _, address: address,
        has_lost_parent=lambda _: False,
        place_of=made._launcher.place_of,
    )
    with pytest.raises(InstanceDeadError, match="instance x0 ended while starting"):
        await asyncio.wait_for(made.start(30.0), 60)
    never.set()
    made.kill()  # its process id is no longer its own


@pytest.mark.parametrize("awaited", ["weights", "budget", "nothing"])
async def test_one_that_is_given_up_or_loads_other_files_does_not_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, awaited: str
) -> None:
    llm: Any = SimpleNamespace(
        engine_core=SimpleNamespace(
            resources=SimpleNamespace(engine_dead=False),
            utility_results={},
            _ensure_output_queue_task=int,
        ),
        output_processor=SimpleNamespace(propagate_error=str, request_states={}),
        vllm_config=SimpleNamespace(
            cache_config=SimpleNamespace(num_gpu_blocks=1, block_size=16),
            **vars(model_shapes.configured()),
        ),
        _run_output_handler=int,
        shutdown=lambda timeout: None,
    )
    made = instance(tmp_path, lambda _: llm)
    reached, may_go_on = asyncio.Event(), asyncio.Event()
    found = ["w", "other" if awaited == "nothing" else "w"]

    async def wait(*_: object) -> None:
        reached.set()
        await may_go_on.wait()

    async def at_once(*_: object) -> None: ...

    async def thread(work: Callable[[], object]) -> object:
        if awaited == "weights" and len(found) == 1:
            await wait()
        return work()

    async def launched(*_: object) -> int:
        return 0

    async def settled(work: Any, _: float | None = None) -> object:
        work.close() if asyncio.iscoroutine(work) else work.cancel()
        return llm

    monkeypatch.setattr(instances.processes, "in_daemon_thread", thread)
    monkeypatch.setattr(instances, "weights_of", lambda _: found.pop(0))
    made._launcher = SimpleNamespace(
        start=launched,
        turn_to_start=made._launcher.turn_to_start,
        address_there=lambda _, address: address,
        has_lost_parent=lambda _: False,
    )
    made._unless_ended = settled
    made.settings = EngineSettings(made.settings.config, made.settings.budgets)
    made.take_budget = wait if awaited == "budget" else at_once
    starting = asyncio.create_task(made.start(1.0))
    if awaited == "nothing":
        with pytest.raises(InstanceDeadError, match="model changed while it loaded them"):
            await starting
        return
    await asyncio.wait_for(reached.wait(), 60)
    made.mark_dead()
    may_go_on.set()
    with pytest.raises(InstanceDeadError, match="x0 was ended while starting"):
        await starting
    assert (made.state, made.llm) == (State.DEAD, None)


class Mortal:
    """An instance whose ``starts`` are errors or None."""

    def __init__(self, *starts: Exception | None) -> None:
        self.id, self.role, self.state = InstanceId("x1"), Role.DECODE, State.STARTING
        self.service, self.has_lost_client = ServiceState("x1"), False
        self.pid = self.num_kills = self.num_probes = 0
        self.place = InstancePlace()
        self.report: Any = None
        self.llm = object()
        self.dying, self.ended = asyncio.Event(), asyncio.Event()
        self._given_back = asyncio.Event()
        self._given_back.set()
        self.starts_left = list(starts)

    async def start(self, _: float) -> None:
        error = self.starts_left.pop(0)
        if error is not None:
            raise error
        self.dying.clear()
        self.ended.clear()
        self.has_lost_client = False
        self.report = None
        self.state = State.READY

    @property
    def takes_requests(self) -> bool:
        return self.state is State.READY and self.service.takes_requests

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
    monkeypatch.setattr(supervisor, "_FIRST_DELAY_S", 0.001)
    monkeypatch.setattr(probe, "_PROBE_INTERVAL_S", 0.001)


def cluster_of(*mortals: Mortal, stall_s: float = 600.0, retry_s: float = 600.0) -> Cluster:
    instances: Any = mortals
    return Cluster(instances, WallClock(), ClusterTimeouts(1.0, stall_s, retry_s=retry_s))


@pytest.mark.usefixtures("quick")
async def test_nothing_ends_the_watch_over_an_instance() -> None:
    mortal = Mortal(None, OSError(24, "too many open files"), InstanceDeadError("no"), None)
    cluster = cluster_of(mortal)
    told = []

    def fail(_: InstanceId) -> None:
        raise ValueError("what follows fails")

    cluster.supervisor.on_ended += [fail, told.append]
    await cluster.start(lambda _: None)
    await until(lambda: mortal.num_probes > 1)
    mortal.end()
    await until(lambda: not mortal.starts_left)
    assert (mortal.state, told, mortal.num_kills) == (State.READY, ["x1"], 2)
    await cluster.stop()


@pytest.mark.usefixtures("quick")
async def test_an_instance_that_is_removed_is_not_started_again() -> None:
    mortal, told = Mortal(None, None), []
    cluster = cluster_of(mortal)
    cluster.supervisor.on_ended.append(told.append)
    await cluster.start(lambda _: None)
    await cluster.remove(mortal.id)
    assert (mortal.state, told, mortal.starts_left) == (State.DEAD, ["x1"], [None])
    assert cluster.instances == {}
    with pytest.raises(InstanceDeadError, match="x1 has been removed"):
        cluster.instance(mortal.id)
    await cluster.stop()


@pytest.mark.usefixtures("quick")
async def test_an_instance_that_is_removed_while_it_starts_again_ends() -> None:
    starting, may_start = asyncio.Event(), asyncio.Event()

    class Slow(Mortal):
        async def start(self, _: float) -> None:
            if len(self.starts_left) == 1:
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
    await asyncio.wait_for(removing, 60)
    assert (mortal.starts_left, mortal.ended.is_set()) == ([], True)
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
    await until(lambda: other.starts_left == [] and other.state is State.READY)
    assert sorted(one.id for one in await cluster.taking()) == ["x1", "x2"]
    await cluster.stop()


@pytest.mark.usefixtures("quick")
async def test_streams_go_on_before_the_memory_of_a_dead_instance_is_free() -> None:
    mortal = Mortal(None, None)
    cluster, told = cluster_of(mortal), []
    cluster.supervisor.on_ended.append(told.append)
    await cluster.start(lambda _: None)
    mortal.dying.set()
    await until(lambda: mortal.state is State.DEAD)
    assert (told, len(mortal.starts_left), mortal._given_back.is_set()) == ([], 1, False)
    mortal.ended.set()
    await until(lambda: not mortal.starts_left)
    assert mortal._given_back.is_set()
    assert (mortal.state, told) == (State.READY, ["x1"])
    await cluster.stop()


@pytest.mark.usefixtures("quick")
async def test_an_instance_without_a_client_is_started_again() -> None:
    mortal = Mortal(None, None)
    cluster = cluster_of(mortal)
    await cluster.start(lambda _: None)
    mortal.has_lost_client = True
    await until(lambda: not mortal.starts_left)
    assert (mortal.state, mortal.num_kills > 0) == (State.READY, True)
    await cluster.stop()


@pytest.mark.usefixtures("quick")
async def test_a_look_that_fails_is_not_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[object] = []

    def look(*seen: object) -> bool:
        looks.append(seen)
        if len(looks) == 1:
            raise OSError(24, "too many open files")
        return len(looks) < 4

    monkeypatch.setattr(probe.StallWatch, "has_stalled", look)
    mortal = Mortal(None, None)
    cluster = cluster_of(mortal)
    await cluster.start(lambda _: None)
    await until(lambda: not mortal.starts_left)
    assert (mortal.state, mortal.num_kills) == (State.READY, 1)
    await cluster.stop()


@pytest.mark.usefixtures("quick")
async def test_an_instance_that_stands_still_is_started_again(
    process: subprocess.Popen[bytes],
) -> None:
    mortal = Mortal(None, None)
    cluster = cluster_of(mortal, stall_s=0.05)
    await cluster.start(lambda _: None)
    mortal.pid, mortal.report = process.pid, SimpleNamespace(at_s=WallClock().now() - 1e6)
    await until(lambda: not mortal.starts_left)
    assert (mortal.state, mortal.num_kills > 0) == (State.READY, True)
    await cluster.stop()


@pytest.mark.usefixtures("quick")
async def test_an_instance_that_stands_still_while_it_starts_is_ended(
    process: subprocess.Popen[bytes],
) -> None:
    class Slow(Mortal):
        """Its second start ends when it is killed."""

        async def start(self, _: float) -> None:
            if len(self.starts_left) == 2:
                self.state, self.pid = State.STARTING, process.pid
                self.ended.clear()
                await self.ended.wait()
            await super().start(_)

    mortal = Slow(None, InstanceDeadError("killed"), None)
    cluster = cluster_of(mortal, stall_s=0.05)
    await cluster.start(lambda _: None)
    mortal.end()
    await until(lambda: not mortal.starts_left)
    assert mortal.state is State.READY
    await cluster.stop()


def never_again(*_: object) -> InstanceDeadError:
    return InstanceDeadError("no memory")


@pytest.mark.usefixtures("quick")
async def test_an_instance_waits_for_its_machine_and_is_not_blamed() -> None:
    class Lost(Mortal):
        """Its machine goes with it, and comes back."""

        def kill(self) -> None:
            self.place = InstancePlace(is_there=False)
            super().kill()

    mortal = Lost(*[None] * 13)
    cluster = cluster_of(mortal)
    await cluster.start(lambda _: None)
    for left in reversed(range(12)):
        mortal.kill()
        await until(lambda: mortal.state is State.FAILED)
        assert (cluster.has_failed, cluster.supervisor.failed.is_set()) == (False, False)
        assert len(mortal.starts_left) == left + 1
        mortal.place = InstancePlace()
        assert not cluster.has_failed, "requests wait for the start"
        await until(lambda left=left: len(mortal.starts_left) == left)
        await until(lambda: mortal.state is State.READY)
    await cluster.stop()


@pytest.mark.usefixtures("quick")
async def test_an_instance_that_was_given_up_is_tried_again() -> None:
    mortal = Mortal(None, *map(never_again, range(8)), None)
    other = Mortal(None)
    other.id = InstanceId("x2")
    cluster = cluster_of(mortal, other, retry_s=0.01)
    await cluster.start(lambda _: None)
    mortal.end()
    await until(lambda: not mortal.starts_left)
    assert mortal.state is State.READY
    assert not cluster.supervisor.failed.is_set(), "the other one has served all the time"
    await cluster.stop()


@pytest.mark.usefixtures("quick")
async def test_a_cluster_whose_instances_are_all_given_up_has_failed() -> None:
    mortal = Mortal(None, *map(never_again, range(5)))
    cluster = cluster_of(mortal, retry_s=1e6)
    await cluster.start(lambda _: None)
    assert (cluster.is_healthy, cluster.supervisor.failed.is_set()) == (True, False)
    mortal.end()
    async with asyncio.timeout(30.0):
        await cluster.supervisor.failed.wait()
    assert (cluster.is_healthy, cluster.supervisor.last_failure) == (False, "no memory")
    removing = asyncio.create_task(cluster.remove(mortal.id))
    await asyncio.wait_for(removing, 60)
    await cluster.stop()


async def test_a_server_is_healthy_until_nothing_has_served_for_a_while() -> None:
    class Clock(WallClock):
        at_s = 0.0

        def now(self) -> float:
            return self.at_s

    mortals = [Mortal(), Mortal()]
    mortals[0].role, mortals[1].id = Role.PREFILL, InstanceId("x2")
    clock = Clock()
    instances: Any = mortals
    cluster = Cluster(instances, clock, ClusterTimeouts(unserved_s=10.0))
    for mortal in mortals:
        mortal.state = State.READY
    clock.at_s = 100.0
    assert cluster.is_healthy
    mortals[0].state = State.DEAD
    clock.at_s = 200.0
    assert cluster.is_healthy, "the other one serves both legs"
    mortals[1].service.drain()
    clock.at_s = 209.0
    assert cluster.is_healthy
    clock.at_s = 210.5
    assert not cluster.is_healthy
    with mortals[0].service.replacing():
        assert cluster.is_healthy, "requests wait meanwhile"
    clock.at_s = 230.0
    assert not cluster.is_healthy
    mortals[1].service.release()
    assert cluster.is_healthy


@pytest.mark.usefixtures("quick")
async def test_an_engine_is_well_after_this_process_has_stood_still(
    process: subprocess.Popen[bytes],
) -> None:
    """All that it said before is old then; asked once, it answers."""

    class Fresh:
        num_looks = 0

        @property
        def at_s(self) -> float:
            self.num_looks += 1
            return WallClock().now() + 1e6

    fresh = Fresh()

    class Answering(Mortal):
        async def probe(self, _: float) -> None:
            self.num_probes += 1
            self.report = fresh

    mortal = Answering(None, None)
    cluster = cluster_of(mortal, stall_s=0.05)
    await cluster.start(lambda _: None)
    mortal.pid, mortal.report = process.pid, SimpleNamespace(at_s=WallClock().now() - 1e6)
    await until(lambda: mortal.num_probes > 0)
    await until(lambda: fresh.num_looks > 20)
    assert (mortal.num_kills, mortal.state) == (0, State.READY)
    await cluster.stop()
