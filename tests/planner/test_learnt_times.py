"""Forecasts with the step times that instances have learnt."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from banaserve.base.errors import UserError
from banaserve.base.types import InstanceId, InstanceReport, InstanceView, ObservedRequest, Role
from banaserve.orchestrator.control.costs import profile as profiles
from banaserve.orchestrator.planner.decision import Decision, Situation
from banaserve.orchestrator.planner.forecast_profile import (
    are_learnt,
    as_learnt,
    guessed,
    profile_of,
)
from banaserve.orchestrator.planner.options import ElasticOptions
from banaserve.orchestrator.planner.policy import decide
from depth import chosen_seed

PROFILE = profiles.load("smollm2-135m-cpu")
TOLD = (
    PROFILE.decode_small.fixed_s,
    PROFILE.prefill.token_s,
    PROFILE.prefill.pair_s,
    PROFILE.decode_small.context_token_s,
    PROFILE.decode_small.request_s,
    4e-4,
)


def views(*learnt: tuple[float, ...], **more: int) -> list[InstanceView]:
    report = InstanceReport(0, 0, 0.0, 0.0, 0.0)
    return [
        InstanceView(
            InstanceId(f"c{number}"),
            Role.COLOCATED,
            True,
            replace(report, step_coefficients=coefficients),
            0,
            0,
            1000.0,
            facts=PROFILE.facts,
            step_tokens=2048,
            **more,
        )
        for number, coefficients in enumerate(learnt)
    ]


def faster(times: float) -> tuple[float, ...]:
    return tuple(seconds / times for seconds in TOLD)


def test_nothing_learnt_changes_nothing() -> None:
    assert not are_learnt(views((), ()))
    assert as_learnt(PROFILE, views((), ())) == PROFILE


def test_times_and_room_are_those_of_the_instances() -> None:
    seen = views(faster(5), faster(5), kv_tokens=4096)
    assert are_learnt(seen)
    found = as_learnt(PROFILE, seen)
    assert found.prefill.token_s == pytest.approx(PROFILE.prefill.token_s / 5)
    assert found.prefill.pair_s == pytest.approx(PROFILE.prefill.pair_s / 5)
    for kind in ("fixed_s", "context_token_s", "request_s"):
        own = getattr(found.decode_small, kind)
        assert own == pytest.approx(getattr(PROFILE.decode_small, kind) / 5)
    assert found.memory.kv_tokens == 4096
    assert found.model == PROFILE.model


def test_their_clock_may_run_slower_than_the_forecasts() -> None:
    assert as_learnt(PROFILE, views(faster(1)), 4.0).prefill.token_s == pytest.approx(
        PROFILE.prefill.token_s / 4
    )


def test_work_that_none_has_had_is_as_much_faster_as_the_rest() -> None:
    fixed_s, _, _, context_s, request_s, call_s = faster(5)
    found = as_learnt(PROFILE, views((fixed_s, 0.0, -1e-9, context_s, request_s, call_s)))
    assert found.prefill.token_s == pytest.approx(PROFILE.prefill.token_s / 5)
    assert found.prefill.pair_s == pytest.approx(PROFILE.prefill.pair_s / 5)


def test_fetches_say_how_fast_the_store_is() -> None:
    (view,) = views(faster(1))
    assert view.report is not None
    view = replace(view, report=replace(view.report, fetch_token_s=1e-4))
    found = as_learnt(PROFILE, [view])
    assert found.link.bytes_per_s == pytest.approx(PROFILE.model.token_bytes / 1e-4)


def test_a_model_without_a_profile_is_what_its_instances_say() -> None:
    options = ElasticOptions(profile="")
    found = profile_of(options, views(faster(5), faster(5)))
    assert found.model.num_layers == PROFILE.model.num_layers
    assert found.model.token_bytes == PROFILE.model.token_bytes
    assert found.model.layer_weight_bytes == PROFILE.model.layer_weight_bytes
    assert found.memory.kv_tokens == PROFILE.memory.kv_tokens // 16 * 16
    assert found.prefill.token_s == pytest.approx(PROFILE.prefill.token_s / 5)
    assert found.decode_small.request_s == pytest.approx(PROFILE.decode_small.request_s / 5)


def test_guessed_times_of_a_layer_are_about_in_proportion() -> None:
    """To those measured: a step, a prompt's token and a context's token, each within four times."""
    found, small = guessed(PROFILE.facts), PROFILE.decode_small
    scale = small.fixed_s / found.decode_small.fixed_s
    assert 1 / 4 < found.prefill.token_s * scale / PROFILE.prefill.token_s < 4
    context_s = found.decode_small.context_token_s * scale
    assert 1 / 4 < context_s / small.context_token_s < 4


def test_modules_need_a_profile() -> None:
    with pytest.raises(UserError, match=r"modules is 'layers': .* give profile=NAME"):
        ElasticOptions(profile="", modules="layers")


def prompts_of_576_tokens(per_s: float) -> list[ObservedRequest]:
    draws, at_s, requests = random.Random(chosen_seed(1)), 0.0, []
    while (at_s := at_s + draws.expovariate(per_s)) < 30.0:
        requests.append(ObservedRequest(at_s, 576, 0, 16, None, at_s + 0.4, at_s + 0.9))
    return requests


def decided(seen: list[InstanceView], per_s: float = 1.4, **options: Any) -> Decision:
    options = {"profile": PROFILE.name, "routing": "slo_aware", **options}
    situation = Situation(30.0, seen, prompts_of_576_tokens(per_s), None)
    return decide(situation, ElasticOptions(**options))


def test_a_machine_five_times_as_fast_is_not_overloaded() -> None:
    """What its profile takes for an overload, in which it would change, is an easy load for it."""
    seen = views(faster(5), faster(5))
    assert decided(seen).changes
    for found in (decided(seen, step_times="learnt"), decided(seen, profile="")):
        assert found.candidates
        assert not found.changes, found.reason


def test_nothing_is_planned_before_times_are_learnt() -> None:
    found = decided(views((), ()), profile="")
    assert not found.changes
    assert not found.candidates
    assert found.reason == "what steps take has not been learnt yet"
    assert found.memory is not None
    assert found.memory.next_s == 34.0


FASTER = {"profile": ""}
PLAIN = views(faster(5), faster(5))
SPLIT = [replace(PLAIN[0], role=Role.PREFILL), replace(PLAIN[1], role=Role.DECODE)]
HALF = [replace(PLAIN[0], role=Role.PREFILL), PLAIN[1]]


@pytest.mark.parametrize("seen", [SPLIT, HALF], ids=["split", "half"])
def test_without_limits_all_do_both_again_where_nothing_else_is_clearly_better(
    seen: list[InstanceView],
) -> None:
    found = decided(seen, 1.0, **FASTER)
    assert {change.role for change in found.changes} == {Role.COLOCATED}
    assert decided(PLAIN, 1.0, **FASTER).changes == ()


def test_without_limits_who_prefills_alone_stays_while_that_brings_more() -> None:
    """0.08 at this rate: less than what it takes to leave, more than what it takes to stay."""
    assert decided(HALF, 1.4, **FASTER).changes == ()
    assert decided(PLAIN, 1.4, **FASTER).changes == ()


def test_without_limits_nothing_slower_is_chosen_in_an_overload() -> None:
    """Though a mean of logarithms likes it: some are served at once, others at the end."""
    assert decided(PLAIN, 4.5, **FASTER).changes == ()
    assert decided(PLAIN, 4.5, **FASTER, slowdown_weight=0.0).changes
