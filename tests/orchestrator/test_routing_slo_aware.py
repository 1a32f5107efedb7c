"""SLO-aware routing: what decides between one instance and two, and limits of single requests."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from banaserve.base.errors import UserError
from banaserve.base.types import (
    ClusterView,
    Distance,
    InstanceId,
    InstanceReport,
    InstanceView,
    OutputLengths,
    RequestId,
    RequestLimits,
    RequestView,
    Role,
    Route,
)
from banaserve.orchestrator.control.model.excess import (
    Excesses,
    LegPlace,
    RouteSituation,
    missed,
    missed_by,
)
from banaserve.orchestrator.control.model.output_length import OutputLengthWindow
from banaserve.orchestrator.control.model.serving_times import (
    LegLoad,
    RecentPrompts,
    assumed_coefficients,
    times_of,
)
from banaserve.orchestrator.control.routing.legs import LegOptions
from banaserve.orchestrator.control.routing.registry import make
from banaserve.orchestrator.control.routing.slo_aware import (
    SloAware,
    SloAwareOptions,
    _apart,
    _firsts,
    _whole,
    choose,
)
from depth import seeds

FIXED_S, TOKEN_S, CONTEXT_S, REQUEST_S = 0.01, 1e-4, 1e-7, 1e-4
REPORT = InstanceReport(
    0, 0, 0.0, 0.0, 0.0, step_coefficients=(FIXED_S, TOKEN_S, 1e-9, CONTEXT_S, REQUEST_S, 0.0)
)
ROLES = {"p": Role.PREFILL, "d": Role.DECODE, "c": Role.COLOCATED}
LENGTHS = OutputLengths(100.0, (40, 70, 110, 140), (50, 80, 120, 150))


def instance(
    name: str,
    decoding: int = 0,
    ahead: int = 0,
    context: int = 500,
    fetch_token_s: float = 0.0,
    **fields: object,
) -> InstanceView:
    """One where so many requests of ``context`` tokens decode and ``ahead`` tokens wait."""
    view = InstanceView(
        InstanceId(name),
        ROLES[name[0]],
        True,
        replace(REPORT, fetch_token_s=fetch_token_s),
        decoding + bool(ahead),
        ahead,
        1000.0,
        step_tokens=2048,
        inflight_tokens=decoding * context + ahead,
        inflight_prefill_requests=int(bool(ahead)),
        inflight_prefill_pairs=ahead * ahead,
    )
    return replace(view, **fields)


def routed(
    *views: InstanceView,
    prompt: int = 1000,
    cached: int = 0,
    limits: RequestLimits | None = None,
    legs: LegOptions | None = None,
    most: int = 0,
    is_splittable: bool = True,
    first_token_waits: bool = False,
    resident: dict[str, int] | None = None,
    **options: float,
) -> Route:
    policy = SloAware(SloAwareOptions(**options), legs or LegOptions())
    request = RequestView(
        RequestId("r"),
        prompt,
        cached,
        most,
        limits or RequestLimits(),
        is_splittable,
        first_token_waits,
        {InstanceId(name): count for name, count in (resident or {}).items()},
    )
    cluster = ClusterView(1.0, {view.id: view for view in views}, output_lengths=LENGTHS)
    return policy.route(request, cluster)


def way(route: Route) -> str:
    return f"{route.prefill or ''}>{route.decode} {route.reason}"


# ---- what decides


@pytest.mark.parametrize(
    ("views", "wanted"),
    [
        # Nothing to choose between but the work that lies ahead: latency.
        ((instance("c0", ahead=4000), instance("c1")), ">c1 colocated"),
        # Those who decode are kept from waiting for a prompt.
        ((instance("c0", decoding=30), instance("c1", decoding=2)), ">c1 colocated"),
        # Apart: an idle pair beats itself doing both, since roles are preferences.
        ((instance("p0"), instance("d0")), "p0>d0 two_legs"),
        # Decoders are overloaded and one that prefills has nothing to do: it does both.
        (
            (instance("p0"), instance("d0", decoding=120, context=2000)),
            ">p0 other_role",
        ),
        # Prompts wait where they are computed: a decoder with little to do does both.
        ((instance("p0", ahead=20_000), instance("d0", decoding=1)), ">d0 other_role"),
        # The prompt is long and its KV is slow to fetch: it stays where it is computed.
        (
            (instance("p0"), instance("d0", decoding=4, fetch_token_s=0.005)),
            ">p0 other_role",
        ),
        # One that does both competes with the pair, and wins where it is idle and they are not.
        (
            (instance("p0", ahead=3000), instance("d0", decoding=9), instance("c0")),
            ">c0 colocated",
        ),
    ],
)
def test_one_instance_or_two_by_latency(views: tuple[InstanceView, ...], wanted: str) -> None:
    assert way(routed(*views)) == wanted


def test_a_limit_on_the_first_token_decides_against_the_lower_latency() -> None:
    """At c0 the first token is soon and each further one is late; at c1 it is the other way."""
    soon = instance("c0", decoding=60, context=4000)
    late = instance("c1", ahead=9000)
    assert routed(soon, late).decode == "c1"
    assert routed(soon, late, ttft_s=0.7).decode == "c0"


def test_a_limit_on_further_tokens_decides_against_the_lower_latency() -> None:
    crowded = instance("c0", decoding=60, context=100)
    behind = instance("c1", ahead=90_000)
    assert routed(crowded, behind).decode == "c0"
    assert routed(crowded, behind, tpot_s=0.015).decode == "c1"


def test_others_who_would_miss_their_limit_count_as_much_as_the_request() -> None:
    """A prompt at c0 makes ten that decode miss theirs; at c1 it comes late itself, alone."""
    near_limit, busy = instance("c0", decoding=10), instance("c1", ahead=9000)
    assert routed(near_limit, busy, prompt=10_000, ttft_s=1.5).decode == "c0"
    assert routed(near_limit, busy, prompt=10_000, ttft_s=1.5, tpot_s=0.02).decode == "c1"


def test_a_request_that_is_late_anyway_is_not_queued_where_it_harms_least_for_ever() -> None:
    hopeless, others = instance("c0", ahead=300_000), instance("c1", decoding=1, ahead=10_000)
    limits = {"ttft_s": 0.1, "tpot_s": 0.02}
    for late_weight, wanted in ((0.0, "c0"), (0.1, "c1")):
        found = routed(hopeless, others, prompt=10_000, late_weight=late_weight, **limits)
        assert found.decode == wanted


@pytest.mark.parametrize(
    ("limits", "wanted"),
    [
        (None, "c1"),
        (RequestLimits(ttft_s=0.7), "c0"),
        (RequestLimits(tpot_s=0.5), "c1"),
        (RequestLimits(ttft_s=0.0), "c1"),
    ],
)
def test_a_request_may_name_limits_of_its_own(limits: RequestLimits | None, wanted: str) -> None:
    views = instance("c0", decoding=60, context=4000), instance("c1", ahead=9000)
    assert routed(*views, limits=limits).decode == wanted


def test_a_request_may_have_no_limit_where_others_have() -> None:
    views = instance("c0", decoding=60, context=4000), instance("c1", ahead=9000)
    assert routed(*views, ttft_s=0.7).decode == "c0"
    assert routed(*views, limits=RequestLimits(ttft_s=0.0), ttft_s=0.7).decode == "c1"


def test_what_the_store_holds_is_fetched_and_not_computed() -> None:
    """With its prompt cached a request harms nobody, and need not go where nobody decodes."""
    views = instance("c0", decoding=4), instance("c1", ahead=4000)
    assert routed(*views, prompt=5000).decode == "c1"
    assert routed(*views, prompt=5000, cached=4990).decode == "c0"


def test_one_output_token_has_no_time_between_tokens() -> None:
    crowded = instance("c0", decoding=150, context=100)
    views = crowded, instance("c1", ahead=90_000, inflight_prefill_pairs=3 * 90_000**2)
    limits = RequestLimits(tpot_s=0.0215)
    assert routed(*views, limits=limits).decode == "c1"
    assert routed(*views, limits=limits, most=1).decode == "c0"


def test_a_first_token_that_waits_for_the_handover_decides() -> None:
    """A token that is sampled at the decoder comes when the KV has: too late for its limit."""
    views = instance("p0", decoding=1), instance("d0", fetch_token_s=2e-4)
    assert way(routed(*views, ttft_s=0.2)) == "p0>d0 two_legs"
    late = routed(*views, ttft_s=0.2, first_token_waits=True)
    assert way(late) == ">d0 other_role"


def test_room_for_input_and_expected_output_decides() -> None:
    """One that is full keeps a request waiting between its first and its second token."""
    others = instance("p0", decoding=1), instance("d1", decoding=4)
    for kv_tokens, wanted in ((90_000, "p0>d0 two_legs"), (2600, "p0>d1 two_legs")):
        small = instance("d0", decoding=3, kv_tokens=kv_tokens)
        assert way(routed(*others, small)) == wanted


def situation(draws: random.Random) -> RouteSituation:
    """A request at random instances, which are often alike, some of them on another machine."""
    leg = LegLoad(draws.randrange(1, 4000), draws.choice((0, 500)), draws.uniform(1, 300))
    places = {}
    for number in range(draws.randrange(2, 12)):
        name = f"{draws.choice('ppddc')}{number}"
        view = instance(name, draws.choice((0, 1, 40, 90)), draws.choice((0, 0, 3000, 30_000)))
        if draws.random() < 0.2:
            view = replace(view, far=dict.fromkeys(places, Distance(0.01, 1e9)))
        recent = RecentPrompts(draws.choice((0.0, 0.5 / TOKEN_S)), 0.0, draws.choice((0.0, 2.0)))
        times = times_of(view, 100.0, (), recent)
        places[view.id] = LegPlace(
            view,
            times,
            leg,
            times.first_token_s(leg),
            times.leg_s(leg),
            times.added_token_s(leg.prompt),
        )
    limits = RequestLimits(draws.choice((0.0, 0.1, 1.0)), draws.choice((0.0, 0.02, 0.1)))
    is_late, may_leave = draws.random() < 0.3, True
    own = tuple(sorted(draws.randrange(1, 500) for _ in range(4)))
    tpot_s = draws.choice((0.0, 0.02, 0.05))
    return RouteSituation(
        places, leg, leg.prompt, LENGTHS, own, limits, tpot_s, set(), False, is_late, may_leave
    )


@pytest.mark.parametrize("seed", seeds(400, 60))
def test_the_choice_is_the_one_by_the_excesses_of_all_candidates(seed: int) -> None:
    draws = random.Random(seed)
    for _ in range(10):
        s = situation(draws)
        options = SloAwareOptions(tolerance=draws.choice((0.0, 0.05, 0.3)))
        excesses = Excesses(s, options.late_weight)
        found = [*_whole(s, options), *_apart(s, _firsts(s))]
        for one in found:
            assert excesses.LEAST <= excesses.least_of(one) <= excesses.of(one)
        most = min(excesses.of(one) for one in found) + options.tolerance
        able = [one for one in found if excesses.of(one) <= most]
        assert choose(s, options) == min(able, key=lambda one: one.latency_s)


# ---- legs that are given


@pytest.mark.parametrize(
    ("views", "cached", "is_splittable", "wanted"),
    [
        ((instance("p0"), instance("d0")), 990, True, ">d0 short_prompt"),
        ((instance("p0"), instance("d0")), 0, False, ">d0 short_prompt"),
        ((instance("d0"), instance("d1", decoding=3)), 0, True, ">d0 fallback_no_prefill_instance"),
        ((instance("p0", ahead=9), instance("p1")), 0, True, ">p1 fallback_no_decode_instance"),
    ],
)
def test_one_leg_where_two_are_impossible(
    views: tuple[InstanceView, ...], cached: int, is_splittable: bool, wanted: str
) -> None:
    legs = LegOptions(skip_prefill_below_tokens=16)
    found = routed(*views, cached=cached, legs=legs, is_splittable=is_splittable)
    assert way(found) == wanted


def test_without_fallback_roles_are_kept_to() -> None:
    views = instance("p0"), instance("d0", decoding=120, context=2000)
    assert way(routed(*views, legs=LegOptions(fallback=False))) == "p0>d0 two_legs"


def test_two_that_do_both_hand_nothing_over() -> None:
    views = instance("c0", ahead=3000), instance("c1", decoding=90), instance("d0", decoding=400)
    assert routed(*views).prefill is None


# ---- where the prompt's KV lies


@pytest.mark.parametrize(
    ("views", "resident", "wanted"),
    [
        # Of equals the one that has it.
        ((instance("c0"), instance("c1")), {"c1": 992}, ">c1 colocated"),
        # The next turn is appended where the last one decoded,
        ((instance("p0"), instance("d0")), {"d0": 992}, ">d0 other_role"),
        # unless those who decode there are too many.
        ((instance("p0"), instance("d0", decoding=60)), {"p0": 992, "d0": 992}, ">p0 other_role"),
        (
            (instance("p0"), instance("d0"), instance("d1", decoding=60)),
            {"d1": 992},
            "p0>d0 two_legs",
        ),
        # Half of it is not worth a wait behind many prompts.
        ((instance("c0", ahead=20_000), instance("c1")), {"c0": 496}, ">c1 colocated"),
        ((instance("p0"), instance("p1"), instance("d0")), {"p1": 992}, "p1>d0 two_legs"),
    ],
)
def test_a_prompt_goes_where_its_kv_lies_if_that_is_faster(
    views: tuple[InstanceView, ...], resident: dict[str, int], wanted: str
) -> None:
    assert way(routed(*views, resident=resident)) == wanted


def test_a_decoder_that_has_the_prompt_already_fetches_less_of_it() -> None:
    views = instance("p0"), instance("d0", fetch_token_s=1e-4), instance("d1", fetch_token_s=1e-4)
    resident = {"p0": 992, "d1": 512}
    assert way(routed(*views, resident=resident)) == "p0>d1 two_legs"


# ---- memory of what was sent


def test_equals_take_turns() -> None:
    policy = make("slo_aware")
    cluster = ClusterView(1.0, {name: instance(name) for name in ("c0", "c1", "c2")})
    found = [policy.route(RequestView(RequestId("r"), 100), cluster).decode for _ in range(6)]
    assert found == ["c0", "c1", "c2", "c0", "c1", "c2"]


def test_a_decoder_that_is_promised_requests_is_not_given_all_of_them() -> None:
    """The router counts a leg where it is; those on their way from a prompt are remembered."""
    policy = make("slo_aware")
    views = {name: instance(name) for name in ("p0", "p1")}
    views |= {"d0": instance("d0"), "d1": instance("d1", decoding=3)}
    request = RequestView(RequestId("r"), 4000)
    found = [policy.route(request, ClusterView(1.0, views)).decode for _ in range(8)]
    assert found[0] == "d0"
    assert "d1" in found
    later = ClusterView(60.0, views)
    assert policy.route(request, later).decode == "d0"


def test_what_prompts_cost_is_learnt_after_they_have_come() -> None:
    """On engines that have just started: the first guess of their speed is a tenth of the truth."""

    def predicted_s(at_first: InstanceView) -> float | None:
        policy = make("slo_aware")
        request = RequestView(RequestId("r"), 1000)
        for now_s in (1.0, 2.0, 3.0):
            policy.route(request, ClusterView(now_s, {"c0": at_first}))
        return policy.route(request, ClusterView(4.0, {"c0": instance("c0")})).tpot_s

    slow = instance("c0", report=None, prefill_tokens_per_s=1000.0)
    assert predicted_s(slow) == predicted_s(instance("c0"))


# ---- predictions


def test_times_of_one_instance() -> None:
    times = times_of(instance("c0", decoding=10, ahead=3000, fetch_token_s=1e-5), 100.0)
    assert (times.batch, times.all_requests) == (10, 11)
    assert times.context_tokens == 10 * 500 + 10 * 50
    step_s = FIXED_S + 10 * REQUEST_S + 5500 * CONTEXT_S
    assert times.chunk_tokens == 2038
    # 3,000 and 1,000 tokens: two steps, behind half of the one under way.
    ahead_s = 3000 * TOKEN_S + 9e6 * 1e-9
    own_s = 1000 * TOKEN_S + 1e6 * 1e-9
    under_way_s = (step_s + 2038 / 3000 * ahead_s) / 2
    wanted_s = under_way_s + 2 * step_s + ahead_s + own_s
    assert times.first_token_s(LegLoad(1000, 0, 100)) == pytest.approx(wanted_s)
    assert times.handover_s(1000) == pytest.approx(0.01 + under_way_s)


def test_prompts_that_keep_coming_take_their_share_of_the_time() -> None:
    alone, shared = (
        times_of(instance("c0", decoding=10), 100.0, (), RecentPrompts(share / TOKEN_S))
        for share in (0.0, 0.5)
    )
    assert shared.token_s_with() == pytest.approx(2 * alone.token_s_with())
    always = times_of(instance("c0", decoding=10), 100.0, (), RecentPrompts(7.0 / TOKEN_S))
    assert always.token_s_with() == pytest.approx(10 * alone.token_s_with())


def test_a_short_output_meets_no_prompt_or_waits_for_it_long() -> None:
    """Prompts take half of the time, so a token takes two steps on average."""
    times = times_of(instance("c0", decoding=10), 100.0, (), RecentPrompts(0.5 / TOKEN_S, 0.0, 2.0))
    step_s = times.step_s_with()
    assert times.interrupted(step_s) == pytest.approx((step_s, 2 * step_s))
    for steps, few, many in ((1.5, 0.05, 0.9), (5.0, 0.05, 0.0), (40.0, 0.0, 0.0)):
        assert missed_by(times, (2,), steps * step_s, step_s) == pytest.approx(few, abs=0.06)
        assert missed_by(times, (5000,), steps * step_s, step_s) == pytest.approx(many, abs=0.06)
    assert missed_by(times, (2,), 5 * step_s, step_s) > 0.01
    alone = times_of(instance("c0"), 100.0)
    assert missed_by(alone, (5, 5), step_s, step_s) == pytest.approx(0.5)
    assert missed_by(alone, (1,), step_s, 1e9) == 0.0


def test_no_room_until_others_end() -> None:
    full = instance("d0", decoding=10, kv_tokens=6000)
    assert times_of(full, 100.0).room_s(200, 100.0) == 0.0
    assert times_of(full, 100.0).room_s(2000, 100.0) > 0.1
    assert times_of(replace(full, kv_tokens=0), 100.0).room_s(10**6, 100.0) == 0.0


def test_steps_not_learnt_yet_are_taken_as_one_speed() -> None:
    view = instance("c0", report=None, prefill_tokens_per_s=500.0)
    assert times_of(view, 100.0).first_token_s(LegLoad(1000, 0, 1)) == pytest.approx(2.0)
    route = routed(view, instance("c1", ahead=500, report=None))
    assert route.decode == "c0"


def test_what_an_instance_has_not_learnt_is_taken_from_its_peers() -> None:
    """One that has never prefilled is not taken for one that does so in no time."""
    never = replace(REPORT, step_coefficients=(FIXED_S, 0.0, 0.0, CONTEXT_S, REQUEST_S, 0.0))
    views = instance("c0", decoding=1, report=never), instance("c1"), instance("c2", report=None)
    assumed = assumed_coefficients(views)
    assert assumed == REPORT.step_coefficients
    for view in views:
        assert times_of(view, 100.0, assumed).leg_s(LegLoad(1000, 0, 1)) == pytest.approx(0.101)
    assert routed(*views[:2]).decode == "c1"


def test_a_fit_that_errs_below_zero_predicts_no_negative_time() -> None:
    report = replace(REPORT, step_coefficients=(-1.0, 1e-4, -1.0, -1.0, -1.0, 0.0))
    times = times_of(instance("c0", decoding=3, report=report), 100.0)
    assert times.first_token_s(LegLoad(1000, 0, 1)) == pytest.approx(0.1)


def test_chance_to_miss_a_limit() -> None:
    assert missed(0.0) == 0.0
    assert missed(1.0) == 0.5
    assert 0.99 < missed(2.0) <= missed(1e9) <= 1.0


def test_a_route_says_what_was_predicted() -> None:
    found = routed(instance("c0"), prompt=1000)
    assert found.ttft_s == pytest.approx(FIXED_S + 1000 * TOKEN_S + 1e-3)
    assert found.tpot_s == pytest.approx(FIXED_S + REQUEST_S + 1050 * CONTEXT_S, rel=0.01)


def test_output_lengths_weigh_the_long_ones_that_are_present_longer() -> None:
    window = OutputLengthWindow()
    assert window.lengths is None
    for _ in range(8):
        for tokens in (10, 10, 10, 970):
            window.ended(tokens)
    assert window.lengths == OutputLengths(250.0, (10, 10, 10, 970), (970, 970, 970, 970))
    for _ in range(300):
        window.ended(8)
    assert window.lengths == OutputLengths(8.0, (8, 8, 8, 8), (8, 8, 8, 8))


@pytest.mark.parametrize(
    "options",
    [
        {"ttft_s": -1},
        {"tpot_s": float("nan")},
        {"rate_window_s": 0},
        {"off_role_factor": 0.5},
        {"tolerance": -0.1},
    ],
)
def test_options_out_of_range(options: dict[str, float]) -> None:
    with pytest.raises(UserError, match=next(iter(options))):
        make("slo_aware", **options)
