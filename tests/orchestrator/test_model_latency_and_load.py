"""Latency, throughput, utilisation and load vectors, against numbers worked out by hand."""

from __future__ import annotations

import pytest

import paper_equations
from banaserve.base.errors import UserError
from banaserve.base.types import (
    ClusterView,
    InstanceFacts,
    InstanceId,
    InstanceReport,
    InstanceView,
    Load,
    Role,
)
from banaserve.orchestrator.control import measure
from banaserve.orchestrator.control.measure import LeftOut, ScalarLoad
from banaserve.orchestrator.control.model import utilisation
from paper_equations import Latency

FIGURE_2B_PREFILL = Load(0.95, 0.35)
FIGURE_2B_DECODE = Load(0.35, 0.95)


def test_latency_of_a_request_and_of_many() -> None:
    short = Latency(0.25, 0.1, 11)
    assert short.end_to_end_s == pytest.approx(1.25)
    # As printed, (0.25 + 0.1) and so on: one token's time for all of them.
    assert paper_equations.mean_latency_s([short, Latency(0.35, 0.05, 1)]) == pytest.approx(0.8)
    with pytest.raises(ValueError, match="no requests"):
        paper_equations.mean_latency_s([])


def test_ttft_has_the_queue_of_prefill_and_the_hand_over_delays_the_second_token() -> None:
    assert paper_equations.ttft_s(0.2, 0.01, 0.127) == pytest.approx(0.337)
    assert paper_equations.first_gap_s(0.03, 0.05, 0.025) == pytest.approx(0.105)


def test_a_decode_step_is_bound_by_memory_or_by_compute() -> None:
    """OPT-13B on 312 Tflop/s and 2 TB/s: 25.2 GB of weights, 48 contexts of 300 tokens."""
    kv_bytes = 48 * 300 * 819_200
    step_s = paper_equations.tpot_s(48 * 25.2e9, 312e12, 25.2e9, kv_bytes, 2e12, overhead_s=0.002)
    assert step_s == pytest.approx(0.0184983 + 0.002, rel=1e-5)
    large_s = paper_equations.tpot_s(4096 * 25.2e9, 312e12, 25.2e9, 0, 2e12)
    assert large_s == pytest.approx(0.330831, rel=1e-5)


def test_a_closed_loop() -> None:
    """Ten clients, 101 tokens each in 1 + 100 x 0.04 s."""
    assert paper_equations.closed_loop_tokens_per_s(10, Latency(1.0, 0.04, 101)) == pytest.approx(
        202
    )


def test_work_and_utilisation() -> None:
    """629 Mflop a layer and token; 1,000 tokens in 127 ms on 312 Tflop/s."""
    flops = paper_equations.prefill_flops(40, 629e6, 1000)
    assert flops == pytest.approx(25.16e12)
    assert paper_equations.compute_utilisation(flops, 312e12, 0.127132) == pytest.approx(
        0.6343, 1e-3
    )
    assert paper_equations.compute_utilisation(flops, 312e12, 0.01) == 1.0
    assert paper_equations.decode_step_flops(40, 629e6, 48) == pytest.approx(1.20768e12)
    assert paper_equations.attention_flops(40, 5120, 1000, 500) == pytest.approx(4.096e11)
    with pytest.raises(ValueError, match="above 0"):
        paper_equations.compute_utilisation(flops, 312e12, 0)


def test_figure_2b_as_published_has_no_gap() -> None:
    published = ScalarLoad("sum")
    loads = {"p": published.of(FIGURE_2B_PREFILL), "d": published.of(FIGURE_2B_DECODE)}
    assert loads == {"p": pytest.approx(1.30), "d": pytest.approx(1.30)}
    assert paper_equations.overloaded(loads, 0.1) == paper_equations.underloaded(loads, 0.1) == []


def test_overloaded_and_underloaded_may_share_members() -> None:
    loads = {"a": 0.9, "b": 0.5, "c": 0.1}
    assert paper_equations.overloaded(loads, 0.3) == ["a", "b"]
    assert paper_equations.underloaded(loads, 0.3) == ["b", "c"]
    assert paper_equations.worst(loads) == 0.9
    assert paper_equations.mean(loads) == pytest.approx(0.5)
    assert paper_equations.worst({}) == paper_equations.mean({}) == 0


@pytest.mark.parametrize(
    ("scalar", "value"),
    [
        (ScalarLoad(), 0.95),
        (ScalarLoad("sum"), 1.30),
        (ScalarLoad("weighted", 0.25), 0.25 * 0.95 + 0.75 * 0.35),
    ],
)
def test_scalars(scalar: ScalarLoad, value: float) -> None:
    assert scalar.of(FIGURE_2B_PREFILL) == pytest.approx(value)


def test_scalars_refuse_what_makes_no_sense() -> None:
    with pytest.raises(UserError, match="did you mean maximum"):
        ScalarLoad("maximun")
    with pytest.raises(UserError, match="compute_weight"):
        ScalarLoad("weighted", 1.5)


def test_pressure_sees_one_of_two_equal_maxima_fall() -> None:
    """Fourth powers: 2 x 0.81451 + 2 x 0.01501 = 1.65903; then 0.81451 + 0.31641 + ..."""
    before = sum(utilisation.pressure(load) for load in (0.95, 0.35, 0.35, 0.95))
    assert before == pytest.approx(1.65903 / 4, abs=1e-5)
    after = sum(utilisation.pressure(load) for load in (0.95, 0.55, 0.35, 0.75))
    assert before - after == pytest.approx((0.81451 - 0.31641 + 0.01501 - 0.09151) / 4, abs=1e-5)


def test_relief_counts_in_full_at_full_load_and_an_eighth_of_it_at_half() -> None:
    at_full = utilisation.pressure(1.0) - utilisation.pressure(0.999)
    at_half = utilisation.pressure(0.5) - utilisation.pressure(0.499)
    assert at_full == pytest.approx(0.001, rel=0.01)
    assert at_half == pytest.approx(0.001 / 8, rel=0.01)


def test_efficiency_as_published_and_with_a_unit() -> None:
    assert utilisation.published_efficiency(0.6, 0.2, 0.5) == pytest.approx(0.8)
    assert utilisation.efficiency(0.05, 30.0, 0.5) == pytest.approx(3.0)
    assert utilisation.efficiency(0.05, 30.0, 0.0) == float("inf")


def test_the_joint_objective_has_no_unit() -> None:
    objective = paper_equations.Objective(latency_s=2.0, tokens_per_s=1000.0, beta=0.5, gamma=2.0)
    assert objective.value(0.6, 4.0, 500.0) == pytest.approx(0.6 - 0.5 * 2 + 2 * 0.5)


@pytest.mark.parametrize(
    ("busy", "fill", "used", "expected"),
    [
        (0.95, 1.0, 0.35, Load(0.95, 0.35)),
        # A decode batch of 48 takes 31 ms, 20 of which any batch takes.
        (1.0, 0.35, 0.9, Load(0.35, 0.9)),
        (1.2, 1.0, 1.1, Load(1.0, 1.0)),
        (-0.1, 1.0, -0.1, Load(0.0, 0.0)),
    ],
)
def test_the_load_of_a_report(busy: float, fill: float, used: float, expected: Load) -> None:
    report = InstanceReport(1, 0, used, busy, 0.0, step_fill_fraction=fill)
    assert measure.load_of(report) == expected


def test_smoothing_follows_slowly_and_starts_afresh_after_a_change() -> None:
    """One second of a window of five: a fifth of the way."""

    def seen(at_s: float, busy: float, changed_s: float | None = None) -> ClusterView:
        report = InstanceReport(1, 0, 0.5, busy, at_s, step_s=0.03)
        name = InstanceId("d0")
        view = InstanceView(name, Role.DECODE, True, report, 0, 0, 0.0, changed_s=changed_s)
        return ClusterView(at_s, {name: view})

    first, before = measure.smoothed(seen(10.0, 0.5), {})
    assert first == seen(10.0, 0.5)
    second, before = measure.smoothed(seen(11.0, 1.0), before)
    [view] = second.instances.values()
    assert view.report is not None
    assert view.report.busy_fraction == pytest.approx(0.6)
    assert (view.report.kv_used_fraction, view.report.at_s) == (0.5, 11.0)
    third, before = measure.smoothed(seen(12.0, 1.0, changed_s=11.5), before)
    assert third == seen(12.0, 1.0, changed_s=11.5)
    much_later, _ = measure.smoothed(seen(90.0, 0.1), before)
    [view] = much_later.instances.values()
    assert view.report is not None
    assert view.report.busy_fraction == pytest.approx(0.1)


def test_an_instance_that_cannot_be_judged_is_left_out_and_says_why() -> None:
    facts = InstanceFacts(2, 2, 100, 16, 16, 10**6)

    def view(name: str, at_s: float | None, ready: bool = True, known: bool = True) -> InstanceView:
        report = None if at_s is None else InstanceReport(0, 0, 0.0, 0.0, at_s)
        kept = facts if known else None
        return InstanceView(InstanceId(name), Role.DECODE, ready, report, 0, 0, 0.0, kept)

    views = [
        view("z", 9.5),
        view("stale", 7.9),
        view("silent", None),
        view("down", 9.9, ready=False),
        view("mla", 9.9, known=False),
        view("a", 8.0),
    ]
    judged = measure.judge(ClusterView(10.0, {v.id: v for v in views}))
    assert [v.id for v in judged.views] == ["a", "z"]
    assert judged.left_out == {
        "stale": LeftOut.STALE,
        "silent": LeftOut.NO_REPORT,
        "down": LeftOut.NOT_READY,
        "mla": LeftOut.NO_FACTS,
    }
