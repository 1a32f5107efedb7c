"""A server that starts: questions to engines, to the store, and options of its policy."""

from __future__ import annotations

import asyncio
import dataclasses
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from banaserve.base.errors import UserError
from banaserve.base.types import InstanceId, InstanceView, Role
from banaserve.cli.serve.command_line import parse_serve_argv
from banaserve.engine.compat.engine import EngineDeadError
from banaserve.mains import serve as serving
from banaserve.orchestrator.control.move_policies import registry as migration_policies
from banaserve.orchestrator.control.routing import registry
from banaserve.orchestrator.planner.candidates.arrangement import arrangements
from banaserve.orchestrator.planner.candidates.planning import changes_of
from banaserve.orchestrator.planner.options import ElasticOptions
from banaserve.serving.instances import probe as probes
from banaserve.serving.instances.cluster import Cluster
from banaserve.serving.instances.instance import State
from banaserve.serving.instances.probe import ClusterTimeouts, LivenessProbe
from banaserve.serving.launch.engine_settings import Budgets
from banaserve.serving.requests.prefix_lookup import PrefixLookups
from waiting import until


class Pauses:
    """A clock of its own, which goes on when somebody sleeps."""

    def __init__(self) -> None:
        self.slept_s: list[float] = []

    def now(self) -> float:
        return sum(self.slept_s)

    async def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)


@pytest.mark.parametrize(("drawn", "share"), [(0.0, 1.0), (0.5, 0.75), (1.0, 0.5)])
async def test_dead_instances_are_asked_again_after_pauses_that_grow(drawn, share):
    async def ask() -> str:
        asked_s.append(clock.now())
        raise EngineDeadError

    clock, asked_s = Pauses(), []
    with pytest.raises(UserError, match="do not answer"):
        await serving._answered(ask, clock, lambda: drawn)
    longest = [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0, 10.0, 10.0]
    assert clock.slept_s == [share * pause_s for pause_s in longest]
    assert len(asked_s) == len(longest) + 1
    assert asked_s[-1] == clock.now() <= 60.0


async def test_a_question_that_is_never_answered_is_asked_again(monkeypatch):
    monkeypatch.setattr(serving, "_ANSWER_S", 0.01)
    asked = []

    async def ask() -> str:
        asked.append(1)
        if len(asked) == 1:
            await asyncio.Event().wait()
        if len(asked) == 2:
            raise EngineDeadError
        return "facts"

    assert await serving._answered(ask, Pauses()) == "facts"
    assert len(asked) == 3


async def test_instances_that_never_answer_end_the_start_in_one_line(monkeypatch):
    monkeypatch.setattr(serving, "_ANSWER_S", 0.001)
    with pytest.raises(UserError, match="do not answer: see their logs"):
        await serving._answered(asyncio.Event().wait, Pauses())


class SlowClock:
    """Ten seconds have gone by since the engine was ready when anybody looks after it."""

    def now(self) -> float:
        return 10.0


def probing(instance, clock, stall_s):
    return LivenessProbe(instance, clock, ClusterTimeouts(stall_s=stall_s), lambda: None).run()


async def test_an_engine_that_waited_for_the_others_to_start_has_not_stalled(monkeypatch):
    monkeypatch.setattr(probes, "is_on_cpu", lambda: False)
    looked, killed = [], []

    def view() -> SimpleNamespace:
        looked.append(1)
        return SimpleNamespace(report=SimpleNamespace(at_s=0.0))

    async def probe(_: float) -> None:
        pass

    instance = SimpleNamespace(
        id=InstanceId("p0"),
        state=State.READY,
        pid=1,
        has_lost_client=False,
        view=view,
        probe=probe,
        kill=lambda: killed.append(1),
    )
    watching = asyncio.create_task(probing(instance, SlowClock(), stall_s=1.0))
    await until(lambda: len(looked) >= 2)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert killed == []


@pytest.mark.parametrize(("between_looks_s", "is_ended"), [(100.0, False), (9.0, True)])
async def test_the_time_in_which_this_process_was_stopped_does_not_count(
    monkeypatch, between_looks_s, is_ended
):
    """As by `docker pause`, again and again: nobody could say a word."""
    monkeypatch.setattr(probes, "is_on_cpu", lambda: False)
    monkeypatch.setattr(probes, "_PROBE_INTERVAL_S", 0.001)
    clock, looked, killed = SimpleNamespace(at_s=1000.0), [], []
    clock.now = lambda: clock.at_s

    def later() -> None:
        looked.append(1)
        clock.at_s += between_looks_s

    async def probe(_: float) -> None:
        pass

    instance = SimpleNamespace(
        id=InstanceId("p0"),
        state=State.READY,
        pid=1,
        has_lost_client=False,
        view=lambda: SimpleNamespace(report=SimpleNamespace(at_s=1000.0)),
        probe=probe,
        kill=lambda: killed.append(1),
    )
    timeouts = ClusterTimeouts(stall_s=60.0, spin_s=60.0)
    watching = asyncio.create_task(LivenessProbe(instance, clock, timeouts, later).run())
    await until(lambda: len(looked) >= 20)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert bool(killed) is is_ended


@pytest.mark.parametrize(("quiet_s", "is_asked"), [(0.5, False), (1.0, True)])
async def test_an_engine_is_asked_when_it_has_said_nothing_for_a_second(
    monkeypatch, quiet_s, is_asked
):
    monkeypatch.setattr(probes, "is_on_cpu", lambda: False)
    monkeypatch.setattr(probes, "_PROBE_INTERVAL_S", 0.001)
    clock, looked, asked = SlowClock(), [], []

    def view() -> SimpleNamespace:
        looked.append(1)
        return SimpleNamespace(report=SimpleNamespace(at_s=clock.now() - quiet_s))

    async def probe(_: float) -> None:
        asked.append(1)

    instance = SimpleNamespace(
        id=InstanceId("p0"), state=State.READY, pid=1, has_lost_client=False, view=view, probe=probe
    )
    watching = asyncio.create_task(probing(instance, clock, stall_s=1000.0))
    await until(lambda: len(looked) >= 3)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert bool(asked) is is_asked


@pytest.mark.parametrize(
    ("roles", "cached"),
    [
        ((Role.COLOCATED, Role.COLOCATED), 0),
        ((Role.COLOCATED, Role.PREFILL), 32),
        ((Role.PREFILL, Role.DECODE), 32),
    ],
)
async def test_the_store_is_asked_only_where_a_request_may_have_two_legs(roles, cached):
    asked = []

    def cached_tokens(request: object) -> int:
        asked.append(request)
        return 32

    instances = [SimpleNamespace(id=InstanceId(f"i{n}"), role=role) for n, role in enumerate(roles)]
    lookups = PrefixLookups(Cluster(instances, SlowClock(), ClusterTimeouts()))
    request = SimpleNamespace(prompt_token_ids=[1] * 40)
    assert await lookups.cached_tokens(request) == 0  # there is no store
    lookups.by_weights["w"] = SimpleNamespace(cached_tokens=cached_tokens)
    assert await lookups.cached_tokens(request) == cached
    assert len(asked) == bool(cached)


# ---- the policy's options


def engines(num_tokens: int, num_requests: int) -> SimpleNamespace:
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(
            max_num_batched_tokens=num_tokens,
            max_num_seqs=num_requests,
            max_num_scheduled_tokens=None,
            max_num_active_seqs=None,
        )
    )


@pytest.mark.parametrize(
    ("num_tokens", "num_requests", "sizes"),
    [
        (8192, 256, (512, 1024, 2048)),
        (1024, 32, (512, 1024)),
        (300, 32, (300,)),
        (4096, 1024, (1024, 2048)),
    ],
)
def test_elastic_asks_engines_for_steps_that_they_can_do(num_tokens, num_requests, sizes):
    config, own = parse_serve_argv(["--instances", "2"]), engines(num_tokens, num_requests)
    options = ElasticOptions(**serving._section(config, own))
    assert options.step_sizes == sizes
    views = [
        InstanceView(InstanceId(f"c{n}"), Role.COLOCATED, True, None, 0, 0, 1.0) for n in range(3)
    ]
    budgets = Budgets.of(config, own)
    for wanted in arrangements(3, options.step_sizes):
        for change in changes_of(wanted, views, options.feasible):
            given = budgets.of_steps(change.role, change.step_tokens)
            assert given.num_tokens == change.step_tokens


def test_what_the_command_line_says_reaches_the_policy():
    argv = ["--instances", "2", "--slo-ttft", "2", "--pace", "opt-13b-a100", "--dilate", "4"]
    config = parse_serve_argv(argv)
    assert serving._section(config, engines(2048, 128)) == {
        "profile": "opt-13b-a100",
        "dilation": 4.0,
        "ttft_s": 2.0,
        "tpot_s": 0.0,
        "routing": "slo_aware",
        "min_step_tokens": 128,
        "max_step_tokens": 2048,
    }
    assert config.routing_section == {"ttft_s": 2.0, "tpot_s": 0.0}
    off = parse_serve_argv(["m", "--orchestrator", "off", "--orchestrator-policy", "elastic"])
    assert serving._section(off, engines(2048, 128)) == {}


@pytest.mark.parametrize(("policy", "given"), [("repaired", 2), ("still", 0), ("lazy", 0)])
def test_a_policy_of_moves_gets_no_option_that_it_does_not_have(policy, given, monkeypatch):
    of_others = SimpleNamespace(Options=dataclasses.make_dataclass("Options", ["patience_s"]))
    monkeypatch.setitem(migration_policies.POLICIES._found, "lazy", of_others)
    config = parse_serve_argv(["m", "--orchestrator-policy", policy])
    assert len(serving._section(config, engines(2048, 128))) == given


@pytest.mark.parametrize(
    ("argv", "policy", "section"),
    [
        (["--pd", "1:1"], "load_aware", {}),
        (["--elastic"], "slo_aware", {"ttft_s": 0.0, "tpot_s": 0.0}),
        (["--elastic", "--slo-tpot", "0.1"], "slo_aware", {"ttft_s": 0.0, "tpot_s": 0.1}),
        (["--instances", "2", "--orchestrator", "off"], "load_aware", {}),
        (["--elastic", "--routing-policy", "load_aware"], "load_aware", {}),
        (
            ["--routing-policy", "slo_aware", "--slo-ttft", "1", "--routing-option", "ttft_s=2"],
            "slo_aware",
            {"ttft_s": 2, "tpot_s": 0.0},
        ),
    ],
)
def test_who_routes_and_by_which_limits(argv, policy, section):
    config = parse_serve_argv(argv)
    assert (config.routing_policy, config.routing_section) == (policy, section)
    registry.make(policy, **section)


def test_limits_that_nobody_looks_at_are_refused():
    with pytest.raises(
        UserError, match=r"--slo-ttft is used only by .* --routing-policy slo_aware"
    ):
        parse_serve_argv(["--slo-ttft", "1"])


def test_a_forecast_routes_as_the_server_does_where_that_shapes_it():
    for policy, forecast in (("load_aware", "load_aware"), ("least_requests", "load_aware")):
        config = parse_serve_argv(["--elastic", "--routing-policy", policy])
        assert serving._section(config, engines(2048, 128))["routing"] == forecast


@pytest.mark.parametrize(
    ("dilate", "ttft_s", "tpot_s", "window_s"), [(1, 2, 0.1, 10), (4, 8, 0.4, 40)]
)
def test_routing_counts_in_the_time_of_engines_whose_time_is_stretched(
    dilate, ttft_s, tpot_s, window_s
):
    """They learn and report their times on the clock on the wall."""
    argv = ["--model", "smollm2-135m", "--pace", "opt-13b-a100", "--dilate", str(dilate)]
    argv += ["--instances", "2", "--slo-ttft", "2", "--slo-tpot", "0.1"]
    router = serving._router(parse_serve_argv(argv), SimpleNamespace(instances={}))
    options = router.policy.policy._options
    assert (options.ttft_s, options.tpot_s) == (ttft_s, pytest.approx(tpot_s))
    assert (options.rate_window_s, options.tolerance) == (window_s, 0.3)
