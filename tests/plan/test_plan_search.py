"""Search of `banaserve plan` over numbers of GPUs and sizes, and the figures of its pictures."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise

import pytest

from banaserve.base.errors import UserError
from banaserve.cli.main import main
from banaserve.cli.serve.command_line import parse_serve_argv
from banaserve.orchestrator.control.costs.profile import load
from banaserve.sim.result import LatencyLimits
from banaserve.sim.trace import Arrival
from banaserve_bench.plan.page.curves import Placed, find_curves, front
from banaserve_bench.plan.search.advisor import advise, screen
from banaserve_bench.plan.search.candidates import (
    InstanceShape,
    colocated,
    elastic,
    fixed_candidates,
    split,
)
from banaserve_bench.plan.search.engines import AskedEngine, find_devices
from banaserve_bench.plan.search.gain import MOST_RATIO, GoodputRuns, gain_of_one_load
from banaserve_bench.plan.search.loads import PlanLoads
from banaserve_bench.plan.search.question import PlanQuestion
from banaserve_bench.plan.search.sensitivities import find_sensitivities
from banaserve_bench.plan.search.trial import Device, StepError

PROFILE = load("llama-3.1-8b-h100")
ROWS = [Arrival(n / 4, 3000, 60) for n in range(120)]
pytestmark = pytest.mark.deep
needs_package = pytest.mark.skipif(
    find_spec("aiconfigurator_core") is None, reason="the package is not there"
)


def _silent(words: str) -> None:
    assert words


def _question(instances: int, **changes: object) -> PlanQuestion:
    fields: dict[str, object] = {
        "device": Device(PROFILE),
        "profile_name": PROFILE.name,
        "error": StepError(0.05, 0.05),
        "limits": LatencyLimits(1.0, 0.02),
        "loads": PlanLoads(ROWS, [ROWS, ROWS], False),
        "instances": instances,
        **changes,
    }
    return PlanQuestion(**fields)  # type: ignore[arg-type]


def test_a_candidate_of_several_gpus_is_started_with_them() -> None:
    shape = InstanceShape(4, 131_072, True)
    limits = LatencyLimits(1.0, 0.02)
    for one in (
        colocated(2, store=True, shape=shape),
        split(1, 1, 2048, shape, 256),
        elastic(2, PROFILE.name, limits, shape),
    ):
        config = parse_serve_argv(["MODEL", *one.words])
        assert config.vllm_argv[-2:] == ("--tensor-parallel-size", "4")
        gib = int(config.kv_store_size.removesuffix("GiB"))
        assert one.system.store_tokens == gib * 2**30 // 131_072
        assert "of 4 GPUs" in one.name
    assert "of 256 GiB" in split(1, 1, 2048, shape, 256).name


@pytest.mark.parametrize(("kv_tokens", "is_cut"), [(200_000, False), (20_000, True)])
def test_an_engine_without_room_for_the_whole_context_starts_with_a_shorter_one(
    kv_tokens: int, is_cut: bool
) -> None:
    memory = replace(PROFILE.memory, kv_tokens=kv_tokens)
    asked = _question(2, device=Device(replace(PROFILE, memory=memory)))
    words = {parse_serve_argv(["M", *one.words]).vllm_argv for one in asked.fixed_candidates()}
    assert {"--max-model-len" in one for one in words} == {is_cut}


def test_stores_of_other_sizes_are_tried_only_where_prefixes_are_known() -> None:
    sizes = {
        has_prefixes: {one.store_gib for one in fixed_candidates(2, has_prefixes, 2048)}
        for has_prefixes in (False, True)
    }
    assert sizes == {False: {0, 64}, True: {0, 16, 64, 256}}


def test_all_gpus_are_shared_out_whatever_their_number_in_an_instance() -> None:
    asked = _question(4, more_devices=(Device(PROFILE, None, 2), Device(PROFILE, None, 4)))
    found = asked.fixed_candidates()
    assert {one.num_instances * one.gpus for one in found} == {4}
    assert {one.gpus for one in found} == {1, 2, 4}
    assert len({one.name for one in found}) == len(found)
    assert asked.device_of(found[-1]) is asked.more_devices[1]


def test_the_first_estimate_comes_before_other_sizes_and_keeps_the_best() -> None:
    asked = _question(6, max_step_tokens=8192)
    shown = []
    found = screen(asked, _silent, shown.append)
    [glance] = shown
    assert {one.candidate.step_tokens for one in glance.others} == {2048}
    assert len(glance.others) == 5
    kept = {one.candidate.arrangement for one in found.others}
    assert kept == {one.candidate.arrangement for one in glance.others[:3]}
    assert {one.candidate.step_tokens for one in found.others} == {2048, 8192}


def test_gpus_that_are_not_needed_are_an_offer() -> None:
    asked = _question(6, limits=LatencyLimits(5.0, 0.2))
    advice = advise(asked, screen(asked, _silent), _silent)
    [offer] = [one for one in advice.offers if one.kind == "instances"]
    assert offer.offered.candidate.num_instances < 6
    assert offer.offered.goodput >= 0.99


def test_sensitivities_are_of_the_same_two_systems_and_follow_the_error() -> None:
    asked = _question(2)
    two = (split(1, 1, 2048), colocated(2, store=False))
    found = {one.change: one for one in find_sensitivities(asked, *two, _silent)}
    assert len(found) == 8
    narrow, wide = found["error of step times 2.5%"].gain, found["error of step times 10.0%"].gain
    assert wide.low <= narrow.low <= narrow.estimate == wide.estimate
    assert narrow.high <= wide.high
    unknown = find_sensitivities(_question(2, error=None), *two, _silent)
    assert {one.answer for one in unknown} == {"can't tell"}


def test_the_gain_on_one_load_has_the_error_of_step_times_as_its_interval() -> None:
    own, other = GoodputRuns([0.6], [0.9], [1.0]), GoodputRuns([0.3], [0.6], [0.8])
    whole = gain_of_one_load(own, other, 100).whole
    assert whole == pytest.approx((0.6 / 0.8, 1.5, 1.0 / 0.3))
    none = GoodputRuns([0.0], [0.0], [0.0])
    assert gain_of_one_load(own, none, 10_000).whole.high == MOST_RATIO


def test_parts_of_a_requests_time_add_up_to_its_latency() -> None:
    device = Device(PROFILE)
    limits = LatencyLimits()
    for one in (colocated(2, store=False), split(1, 1, 2048)):
        parts = device.time_parts(one, ROWS)
        result = device.run(one, ROWS, _question(2, limits=limits).scenarios[1])
        assert sum(parts) == pytest.approx(result["e2e_mean_s"])
        assert parts.wait_s + parts.prefill_s == pytest.approx(result["ttft_mean_s"])
        assert (parts.handover_s > 1e-3) == (not one.is_colocated)
        assert min(parts) >= 0


def test_curves_rise_with_the_rate_and_no_system_beats_the_front() -> None:
    asked = _question(2)
    curves = find_curves(asked, screen(asked, _silent), (), _silent)
    for points in curves.over_rate.values():
        assert all(a.rate_per_s < b.rate_per_s for a, b in pairwise(points))
        assert points[0].tpot_s < points[-1].tpot_s
    assert set(curves.parts) <= set(curves.over_rate)
    best = front(curves.placed)
    for one in curves.placed:
        assert any(b.latency_s <= one.latency_s and b.per_gpu >= one.per_gpu for b in best)
    some = [Placed("a", 1, 5), Placed("b", 2, 4), Placed("c", 2, 7), Placed("d", 1, 3)]
    assert [one.name for one in front(some)] == ["a", "c"]


@needs_package
def test_gpus_of_an_instance_are_those_that_the_model_fits() -> None:
    asked = AskedEngine("meta-llama/Meta-Llama-3.1-70B", "h100_sxm", None, 8, None)
    assert [one.gpus for one in find_devices(asked)] == [2, 4, 8]
    with pytest.raises(UserError, match="give a larger --tensor-parallel"):
        find_devices(asked._replace(num_gpus=1))
    with pytest.raises(UserError, match="3 GPUs are no instances of 2"):
        find_devices(asked._replace(num_gpus=3, tensor_parallel=2))


@needs_package
def test_a_plan_of_a_model_and_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    load_ = (
        "--prompt-tokens",
        "500-900",
        "--output-tokens",
        "20",
        "--rps",
        "4",
        "--duration",
        "20",
    )
    engine = ("--model", "Qwen/Qwen3-32B", "--device", "h100_sxm", "--gpus", "4")
    assert main(["plan", *load_, *engine, "--seeds", "2", "--price", "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["answer"] in ("no", "can't tell")
    assert told["command"].startswith("banaserve serve Qwen/Qwen3-32B ")
    assert [one["gpus"] for one in told["devices"]] == [1, 2, 4]
    assert told["step_error"]["step"] < 0.05
    assert "this model and device" in told["step_times"]["judged_on"]
    [prices, *_] = told["prices_of_1000"].values()
    # Four GPUs at 2 an hour each, for about 80 requests in 20 s.
    assert prices[0] == pytest.approx(1000 * 8 / 3600 / 4, rel=0.3)
    assert "requests/s in time" in told["expected"]


@needs_package
def test_elastic_roles_of_a_model_learn_the_measured_step_times() -> None:
    devices = find_devices(AskedEngine("Qwen/Qwen3-32B", "h100_sxm", None, 4, None))
    rows = [Arrival(n / 8, 2000, 60) for n in range(240)]
    asked = _question(
        4,
        device=devices[0],
        profile_name="",
        limits=LatencyLimits(1.0, 0.03),
        loads=PlanLoads(rows, [rows, rows], False),
        has_elastic=True,
        more_devices=devices[1:],
    )
    found = screen(asked, _silent)
    [one] = [one for one in (*found.colocated, *found.others) if "elastic" in one.candidate.name]
    device = asked.device_of(one.candidate)
    assert one.candidate.num_instances * device.gpus == asked.num_gpus
    config = parse_serve_argv(["MODEL", *one.candidate.words])
    assert config.orchestrator.is_elastic
    assert config.colocated == one.candidate.num_instances
    # On engines twice as slow the policy has nothing but what they tell, and requests take longer.
    slow = asked.run(one.candidate, rows, asked.scenarios[1]._replace(factor=2.0))
    assert one.result["num_finished"] == slow["num_finished"] == len(rows)
    assert slow["tpot_mean_s"] > 1.5 * one.result["tpot_mean_s"]
