"""Engines that are replaced on purpose, in a cluster without processes, and what may change."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.outputs import CompletionOutput

from banaserve.base.clock import WallClock
from banaserve.base.errors import (
    DeadlineExceededError,
    InstanceDeadError,
    MigrationError,
    UserError,
)
from banaserve.base.types import InstanceId, Role
from banaserve.contracts.restart_api import RestartRequest, RollingRestart
from banaserve.engine.compat.requests import RequestOutput, RequestOutputKind
from banaserve.serving.instances import supervisor
from banaserve.serving.instances.cluster import Cluster
from banaserve.serving.instances.instance import Check, State
from banaserve.serving.instances.probe import ClusterTimeouts
from banaserve.serving.instances.service_state import ServiceState
from banaserve.serving.launch.engine_settings import EngineSettings
from banaserve.serving.launch.launcher import InstancePlace
from banaserve.serving.operations.restart_options import check_fits, check_options
from banaserve.serving.operations.rolling_restart import RollingRestarts
from banaserve.serving.requests.legs import LegMovedError, LegOutputCollector
from waiting import until

NOTHING: Any = SimpleNamespace()
OLD = EngineSettings(NOTHING, NOTHING, "old")
NEW = EngineSettings(NOTHING, NOTHING, "new", argv=("--x",), number=1)


class Engine:
    """An instance whose engine starts, unless its settings are among those that do not."""

    def __init__(self, name: str, role: Role, broken: set[str]) -> None:
        self.id, self.role, self.state = InstanceId(name), role, State.STARTING
        self.settings, self.llm = OLD, None
        self.place = InstancePlace()
        self.service, self.has_lost_client = ServiceState(name), False
        self.pid = self.inflight_requests = self.num_movable = 0
        self.is_paused = False
        self.started: list[str] = []
        self.num_moves = 0
        self._broken = broken
        self._ended = asyncio.Event()

    @property
    def weights(self) -> str:
        return self.settings.weights

    def is_of(self, settings: EngineSettings) -> bool:
        return (settings.weights, settings.argv) == (self.weights, self.settings.argv)

    @property
    def is_ready(self) -> bool:
        return self.state is State.READY

    @property
    def takes_requests(self) -> bool:
        return self.is_ready and self.service.takes_requests

    async def start(self, _: float, check: Check | None = None) -> None:
        self.started.append(self.weights)
        self._ended.clear()
        if f"{self.id}:{self.weights}" in self._broken:
            raise InstanceDeadError(f"{self.id} ended while starting")
        if check is not None:
            instance: Any = self
            await check(instance)
        self.state = State.READY

    def check_not_paused(self) -> None:
        if self.is_paused:
            raise MigrationError("the engines sleep or are paused")

    async def wait_dying(self) -> None:
        await self._ended.wait()

    async def wait_ended(self) -> None:
        await self._ended.wait()

    def giving_back(self) -> Any:
        return contextlib.nullcontext()

    def kill(self) -> None:
        self._ended.set()

    def mark_dead(self, state: State = State.DEAD) -> None:
        self.state = state

    def retire(self, settings: EngineSettings) -> None:
        self.state, self.settings = State.STARTING, settings
        self.inflight_requests -= self.num_movable
        self.num_movable = 0

    def move_streams(self) -> int:
        self.num_moves += 1
        self.inflight_requests -= self.num_movable
        self.num_movable = 0
        return 0

    def last_words(self) -> str:
        return "nothing"

    def view(self) -> Any:
        return SimpleNamespace(report=None)


class World:
    """Two pairs of instances and their rolling restarts."""

    def __init__(self, *broken: str) -> None:
        roles = {"p0": Role.PREFILL, "p1": Role.PREFILL, "d0": Role.DECODE, "d1": Role.DECODE}
        self.engines: Any = {n: Engine(n, role, set(broken)) for n, role in roles.items()}
        self.cluster = Cluster(list(self.engines.values()), WallClock(), ClusterTimeouts())
        self.checked: list[tuple[str, str]] = []
        self.forgotten: list[str] = []
        self.is_scaling = self.scales_meanwhile = False
        coordinator: Any = SimpleNamespace(recent=list)
        self.restarts = RollingRestarts(
            self.cluster,
            coordinator,
            OLD,
            self._make,
            self._check,
            self.forgotten.append,
            600.0,
            WallClock(),
            lambda: self.is_scaling,
        )

    def _make(self, current: EngineSettings, model: str, _: object) -> EngineSettings:
        assert threading.current_thread().daemon, "a server that ends would wait for it"
        self.is_scaling = self.scales_meanwhile
        if model == "bad":
            raise UserError("no engine could serve it")
        return replace(NEW, weights=model) if model else current

    async def _check(self, engine: Any) -> None:
        self.checked.append((engine.id, engine.weights))
        if engine.weights == "nan":
            raise InstanceDeadError("computes no numbers")

    async def run(self, model: str = "") -> RollingRestart:
        found = await self.restarts.begin(RestartRequest(model))
        async with asyncio.timeout(30.0):
            return await self.restarts.wait(found.id, 30.0)

    @property
    def weights(self) -> dict[str, str]:
        return {name: engine.weights for name, engine in self.engines.items()}


Made = Callable[..., Awaitable[World]]


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Made]:
    monkeypatch.setattr(supervisor, "_FIRST_DELAY_S", 0.001)
    made: list[World] = []

    async def make(*broken: str) -> World:
        made.append(World(*broken))
        await made[0].cluster.start(lambda _: None)
        return made[0]

    yield make
    await made[0].restarts.stop()
    await made[0].cluster.stop()


def states(found: RollingRestart) -> dict[str, str]:
    return {one.instance: one.state for one in found.engines}


async def test_all_engines_are_replaced_and_none_is_blamed(world: Made) -> None:
    one = await world()
    found = await one.run("new")
    assert (found.state, found.is_changed) == ("done", True)
    assert one.checked == [(name, "new") for name in ("p0", "d0", "p1", "d1")]
    assert {tuple(engine.started) for engine in one.engines.values()} == {("old", "new")}
    assert (one.restarts.settings.weights, one.forgotten) == ("new", ["new"])
    assert not any(engine.service.is_replaced for engine in one.engines.values())


@pytest.mark.parametrize(
    ("broken", "model", "expected"),
    [
        (["p0:new"], "new", {"p0": "failed", "d0": "waiting", "p1": "waiting", "d1": "waiting"}),
        (["p1:new"], "new", {"p0": "taken back", "d0": "taken back", "p1": "failed"}),
        ([], "nan", {"p0": "failed", "d0": "waiting"}),
    ],
)
async def test_what_does_not_serve_goes_back(
    world: Made, broken: list[str], model: str, expected: dict[str, str]
) -> None:
    one = await world(*broken)
    found = await one.run(model)
    assert found.state == "failed"
    assert "ended while starting" in found.reason or "computes no numbers" in found.reason
    assert expected.items() <= states(found).items()
    assert set(one.weights.values()) == {"old"}
    assert one.restarts.settings is OLD
    assert {engine.state for engine in one.engines.values()} == {State.READY}


async def test_an_engine_that_does_not_go_back_either_is_named(world: Made) -> None:
    one = await world()
    one.engines["p0"]._broken.add("p0:old")
    one.engines["p1"]._broken.add("p1:new")
    found = await one.run("new")
    assert found.state == "failed"
    assert "p0 does not go back" in found.reason
    assert one.weights == {"p0": "new", "p1": "old", "d0": "old", "d1": "old"}


async def test_a_restart_of_what_was_tries_again(world: Made) -> None:
    one = await world()
    one.engines["d0"]._broken.add("d0:old")
    restarting = asyncio.create_task(one.run())
    await until(lambda: len(one.engines["d0"].started) > 2)
    one.engines["d0"]._broken.clear()
    found = await restarting
    assert (found.state, set(states(found).values())) == ("done", {"done"})


async def test_an_engine_whose_machine_is_back_is_replaced_before_it_starts(
    world: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = await world()
    engine, replacing = one.engines["p0"], list[asyncio.Task[None]]()
    new = replace(NEW, weights="new")

    def begin(_: object, now_s: float) -> float:
        work = one.cluster.supervisor.replace(engine, new, one._check)
        replacing.append(asyncio.create_task(work))
        return 0.0

    monkeypatch.setattr(supervisor.RestartPolicy, "next_delay_s", begin)
    engine.place = InstancePlace(is_there=False)
    engine.kill()
    await until(lambda: engine.state is State.FAILED)
    engine.place = InstancePlace()
    await until(lambda: replacing)
    await asyncio.wait_for(replacing[0], 60)
    assert (engine.started, one.checked, engine.state) == (
        ["old", "new"],
        [("p0", "new")],
        State.READY,
    )


async def test_streams_that_no_other_can_take_are_waited_for(world: Made) -> None:
    one = await world()
    for name in ("p0", "p1", "d1"):
        one.engines[name].settings = replace(NEW, weights="other")
    last = one.engines["d0"]
    last.inflight_requests = last.num_movable = 3
    restart = await one.restarts.begin(RestartRequest("new"))
    await until(lambda: restart.engines[1].num_left == 3)
    assert (last.num_moves, last.state, last.service.is_replaced) == (0, State.READY, True)
    assert str(restart) == "1 of 4 engines replaced; d0 draining, 3 left"
    last.inflight_requests = last.num_movable = 0
    assert (await one.restarts.wait(restart.id, 30.0)).state == "done"


async def test_streams_leave_where_others_can_take_them(world: Made) -> None:
    one = await world()
    one.engines["d0"].inflight_requests = one.engines["d0"].num_movable = 3
    assert (await one.run("new")).state == "done"
    assert one.engines["d0"].num_moves


async def test_one_restart_at_a_time_that_can_be_given_up(world: Made) -> None:
    one = await world()
    one.engines["d0"].inflight_requests = 1  # a prompt, which cannot move
    restart = await one.restarts.begin(RestartRequest("new"))
    with pytest.raises(MigrationError, match="under way already"):
        await one.restarts.begin(RestartRequest())
    await until(lambda: restart.engines[1].num_left == 1)
    one.restarts.abort(restart.id)
    found = await one.restarts.wait(restart.id, 30.0)
    assert (found.state, states(found)["p0"]) == ("aborted", "taken back")
    assert set(one.weights.values()) == {"old"}
    with pytest.raises(MigrationError, match="nothing to abort"):
        one.restarts.abort(restart.id)


async def test_an_abort_ends_the_wait_of_a_restart_that_goes_back(world: Made) -> None:
    one = await world()
    one.engines["d0"].inflight_requests = 1  # a prompt, which cannot move
    restart = await one.restarts.begin(RestartRequest("new"))
    await until(lambda: restart.engines[1].num_left == 1)
    first = one.engines["p0"]
    first.inflight_requests = first.num_movable = 1  # no other engine has its weights
    one.restarts.abort(restart.id)
    await until(lambda: restart.state == "going back")
    one.restarts.abort(restart.id)
    found = await one.restarts.wait(restart.id, 30.0)
    assert (found.state, found.reason) == ("aborted", "given up by an operator")
    assert (states(found)["p0"], set(one.weights.values())) == ("taken back", {"old"})


async def test_an_abort_while_the_last_engine_starts_takes_all_back(world: Made) -> None:
    one = await world()

    async def abort(engine: Any) -> None:
        if (engine.id, engine.weights) == ("d1", "new"):
            one.restarts.abort(one.restarts.recent()[0].id)

    one.restarts._check = abort
    found = await one.run("new")
    assert (found.state, found.reason) == ("aborted", "given up by an operator")
    assert (set(one.weights.values()), one.restarts.settings) == ({"old"}, OLD)


async def test_what_is_refused_replaces_nothing(world: Made) -> None:
    one = await world()
    with pytest.raises(UserError, match="no engine could serve it"):
        await one.restarts.begin(RestartRequest("bad"))
    with pytest.raises(UserError, match="give seconds"):
        await one.restarts.begin(RestartRequest(timeout_s=-1.0))
    one.engines["d1"].is_paused = True
    with pytest.raises(MigrationError, match="sleep or are paused"):
        await one.restarts.begin(RestartRequest())
    assert {tuple(engine.started) for engine in one.engines.values()} == {("old",)}


async def test_a_scaling_that_begins_while_settings_are_made_keeps_its_instances(
    world: Made,
) -> None:
    one = await world()
    one.scales_meanwhile = True
    with pytest.raises(MigrationError, match="a scaling is under way"):
        await one.restarts.begin(RestartRequest("new"))
    assert not one.restarts.recent()
    assert {tuple(engine.started) for engine in one.engines.values()} == {("old",)}


# ---- what may change


@pytest.mark.parametrize(
    "words",
    [
        ["--max-num-seqs", "8"],
        ["--max_num_seqs=8", "--no-enforce-eager"],
        ["--compilation-config.mode=0", "-O3", "--seed", "-1"],
        [],
    ],
)
def test_options_of_engines_may_change(words: list[str]) -> None:
    check_options(words)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--max-num-seqs", "8", "--port", "9"], "--port"),
        (["--served_model_name=x"], "--served_model_name"),
        (["--max-num-s", "8"], "--max-num-s"),
        (["-tp", "2"], "-tp"),
        (["--no-enable-prefix-caching"], "--no-enable-prefix-caching"),
        (["--model=x"], "before --"),
    ],
)
def test_options_of_the_front_door_may_not(words: list[str], named: str) -> None:
    with pytest.raises(UserError, match=named):
        check_options(words)


def config(folder: Path, **more: Any) -> Any:
    """What is looked at of vLLM's configuration."""
    text = SimpleNamespace(
        architectures=["A"], vocab_size=10, num_hidden_layers=2, **more.pop("text", {})
    )
    model = {"max_model_len": 64, "dtype": "torch.float32", "model": "m"} | more
    sampling, ends = model.pop("sampling", {}), model.pop("ends", 2)
    return SimpleNamespace(
        model_config=SimpleNamespace(
            hf_text_config=text,
            tokenizer=str(folder),
            get_diff_sampling_param=lambda: sampling,
            try_get_generation_config=lambda: {"eos_token_id": ends},
            **model,
        ),
        cache_config=SimpleNamespace(cache_dtype="auto", block_size=16),
    )


@pytest.mark.parametrize(
    ("more", "has_store", "said"),
    [
        ({}, True, ""),
        ({"max_model_len": 128}, True, ""),
        ({"dtype": "torch.bfloat16"}, False, ""),
        ({"dtype": "torch.bfloat16"}, True, "give --dtype float32"),
        ({"max_model_len": 63}, True, "--max-model-len 64"),
        ({"text": {"hidden_size": 8}}, False, "its hidden_size is 8"),
        ({"sampling": {"top_k": 3}}, False, "defaults of sampling"),
        ({"ends": 3}, False, "end with token 3"),
    ],
)
def test_other_engines_fit_behind_the_front_door_or_are_refused(
    tmp_path: Path, more: dict[str, Any], has_store: bool, said: str
) -> None:
    before, after = config(tmp_path), config(tmp_path, **more)
    if said:
        with pytest.raises(UserError, match=said):
            check_fits(before, after, 64, has_store)
    else:
        check_fits(before, after, 64, has_store)


@pytest.mark.parametrize(
    ("name", "was", "is_now", "fits"),
    [
        ("tokenizer.json", '{"a": 1}', '{"a":1, "transformers_version": "5"}', True),
        ("tokenizer.json", '{"a": 1}', '{"a": 2}', False),
        ("chat_template.jinja", "x", "y", False),
        ("merges.txt", None, "a b", False),
        ("README.md", "x", "y", True),
    ],
)
def test_new_weights_have_the_same_tokenizer(
    tmp_path: Path, name: str, was: str | None, is_now: str, fits: bool
) -> None:
    folders = tmp_path / "old", tmp_path / "new"
    for folder, said in zip(folders, (was, is_now), strict=True):
        folder.mkdir()
        if said is not None:
            (folder / name).write_text(said)
    before, after = map(config, folders)
    if fits:
        check_fits(before, after, 64, True)
    else:
        with pytest.raises(UserError, match="need the same one"):
            check_fits(before, after, 64, True)


# ---- streams that leave


def output(text: str) -> RequestOutput:
    made = CompletionOutput(0, text, [1], None, None)
    return RequestOutput("r", None, None, None, [made], False)


async def test_output_that_comes_before_a_stream_has_left_is_not_lost() -> None:
    """Its state counts as sent what the engine has put out, whoever reads it when."""
    queue = LegOutputCollector(RequestOutputKind.DELTA, "r")
    queue.put(LegMovedError())
    queue.put(output("a"))
    queue.put(output("b"))
    queue.put(InstanceDeadError("its engine was ended"))
    found: Any = await queue.get()
    assert found.outputs[0].text == "ab"
    with pytest.raises(LegMovedError):
        await queue.get()


async def test_a_stream_whose_time_is_over_does_not_go_on_elsewhere() -> None:
    """What came between its deadline and the move is lost: the answer would have a gap."""
    queue = LegOutputCollector(RequestOutputKind.DELTA, "r")
    queue.put(DeadlineExceededError())
    queue.put(output("a"))
    queue.move("drained")
    queue.put(output("b"))
    with pytest.raises(DeadlineExceededError):
        await queue.get()
