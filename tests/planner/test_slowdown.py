"""Throughput that one forecast loses beside another."""

from __future__ import annotations

import random
from dataclasses import replace
from math import inf

import pytest

from banaserve.base.types import InstanceId, InstanceReport, InstanceView, ObservedRequest, Role
from banaserve.orchestrator.planner.decision import Situation
from banaserve.orchestrator.planner.forecasting.forecast import Forecast, slowdown
from banaserve.orchestrator.planner.options import ElasticOptions
from banaserve.orchestrator.planner.policy import decide
from depth import chosen_seed

ARRIVALS_S = tuple(float(second) for second in range(41))


def ending(*ends_s: float) -> Forecast:
    return Forecast((0.0,) * len(ends_s), ARRIVALS_S[: len(ends_s)], ends_s)


def at_rate(share: float, wait_s: float = 1.0) -> Forecast:
    """One that takes ``1 / share`` of a second for what arrives in one."""
    return ending(*(at_s / share + wait_s for at_s in ARRIVALS_S))


@pytest.mark.parametrize(("own", "other", "wanted"), [(0.5, 1.0, 1.0), (0.8, 1.0, 0.25)])
def test_later_and_later_is_slower(own: float, other: float, wanted: float) -> None:
    assert slowdown(at_rate(own), at_rate(other)) == pytest.approx(wanted)
    assert slowdown(at_rate(other), at_rate(own)) == pytest.approx(-wanted)


def test_who_keeps_up_is_not_slower_however_long_each_takes() -> None:
    assert slowdown(at_rate(1.0, wait_s=30.0), at_rate(1.0)) == pytest.approx(0.0)


def test_what_is_still_to_come_at_the_beginning_says_nothing() -> None:
    late = [at_s + (100.0 if at_s <= 10 else 1.0) for at_s in ARRIVALS_S]
    assert slowdown(ending(*late), at_rate(1.0)) == pytest.approx(0.0)


def test_who_lets_one_request_wait_and_serves_the_next_is_not_slower() -> None:
    """Whichever ends: what counts is how many have."""
    turns = [at_s + (6.0 if number % 4 else 1.0) for number, at_s in enumerate(ARRIVALS_S)]
    assert slowdown(ending(*turns), at_rate(1.0, wait_s=5.0)) == pytest.approx(0.0, abs=0.03)


def test_requests_that_never_end_are_time_lost() -> None:
    half = [inf if number % 2 else at_s + 1.0 for number, at_s in enumerate(ARRIVALS_S)]
    assert slowdown(ending(*half), at_rate(1.0)) == pytest.approx(1.0)
    assert slowdown(at_rate(1.0), ending(*half)) == pytest.approx(-1.0)
    none_after = [at_s + 1.0 if at_s < 20 else inf for at_s in ARRIVALS_S]
    assert slowdown(ending(*none_after), at_rate(1.0)) == pytest.approx(21 / 30)
    nothing = ending(*(inf for _ in ARRIVALS_S))
    assert slowdown(nothing, at_rate(1.0)) == 1.0
    assert slowdown(nothing, nothing) == 0.0


def test_nothing_arrives() -> None:
    assert slowdown(ending(), ending()) == 0.0
    assert slowdown(ending(3.0), ending(2.0)) == 0.0


def overload() -> Situation:
    """Twenty seconds in which two that do both end seven eighths of the prompts that come."""
    draws, at_s, free_s = random.Random(chosen_seed(1)), 0.0, 0.0
    requests: list[ObservedRequest] = []
    while (at_s := at_s + draws.expovariate(8.5)) < 20.0:
        free_s = max(free_s, at_s) + 1 / 8
        output = draws.choice((1, 2, 4, 8, 16, 40))
        end_s = free_s + output * 0.1
        has_ended, has_begun = end_s <= 20.0, free_s <= 20.0
        generated = output if has_ended else max(1, int((20.0 - free_s) / 0.1)) if has_begun else 0
        requests.append(
            ObservedRequest(
                at_s, 2000, 0, generated,
                None if has_ended else InstanceId(f"c{len(requests) % 2}"),
                free_s if has_begun else None,
                end_s if has_ended else None,
            )
        )  # fmt: skip
    report = InstanceReport(0, 0, 0.0, 0.0, 0.0)
    views = [
        InstanceView(InstanceId(name), Role.COLOCATED, True, report, 0, 0, 1000.0, step_tokens=2048)
        for name in ("c0", "c1")
    ]
    return Situation(20.0, views, requests, None)


def test_in_an_overload_nothing_slower_is_chosen_for_a_few_that_it_serves_well() -> None:
    """Steps of 512 tokens are a quarter slower there, and 0.04 of the requests are better off."""
    options = ElasticOptions(ttft_s=2.0, tpot_s=0.1, routing="slo_aware")
    blind = decide(overload(), replace(options, slowdown_weight=0.0))
    assert [change.step_tokens for change in blind.changes] == [512, 512]
    assert decide(overload(), options).changes == ()
