"""Hedged requests: who is asked when the first token is late, and whose answer the client gets."""

from __future__ import annotations

import asyncio
import collections
import random

import pytest

from banaserve_route.balancer.config import HealthSettings, HedgeSettings, LimitSettings
from banaserve_route.balancer.requests.hedging import HedgeEvent
from banaserve_route.balancer.targets.outcomes import AttemptOutcome, FirstTokenTimes
from counters import counted
from depth import chosen_seed

SOON = HedgeSettings(after="1ms", max_fraction=1.0)
NEVER = HedgeSettings(after="900000ms", max_fraction=1.0)
CALM = HealthSettings(interval_s=60)


class Script:
    """Replicas that each do one thing with the next request, in the order in which they are asked.

    Attributes:
        gone: Numbers of the attempts that were cancelled.
        may_go_on: Events for which attempts wait, by their numbers.
    """

    def __init__(self, *steps):
        self.steps, self.num_asked, self.gone = list(steps), 0, []
        self.may_go_on = collections.defaultdict(asyncio.Event)

    async def __call__(self, asked):
        number, self.num_asked = self.num_asked, self.num_asked + 1
        step = self.steps[number]
        if step in ("break", "busy", "late"):
            await self.may_go_on[number].wait()
        if isinstance(step, int):
            await asked.answer(step, b"%d" % number)
        elif step in ("kill", "break"):
            asked.kill()
        elif step == "hold":
            await asked.until_gone()
            self.gone.append(number)
        elif step == "busy":
            await asked.answer(503, b"busy")
        elif step == "late":
            await asked.answer(200, b"%d" % number)
        elif step == "head":
            await asked.begin_stream()
            await asked.until_gone()
            self.gone.append(number)
        elif step == "stream":
            await asked.begin_stream()
            await asked.event(f"{number}")
            await asked.end_stream()


async def balanced(house, *steps, num_replicas=3, hedge=SOON, **settings):
    script = Script(*steps)
    replicas = [await house.replica(script) for _ in range(num_replicas)]
    await house.balance(*replicas, hedge=hedge, health=CALM, **settings)
    await house.first_probes(replicas)
    return script


def views(house):
    return [one.view for one in house.balancer.targets.values()]


def events(house):
    return {one: counted(house.balancer, "hedges", outcome=one) for one in HedgeEvent}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages"])
async def test_a_late_request_is_answered_by_the_second_replica(house, path):
    script = await balanced(house, "hold", 200)
    reply = await house.ask(path)
    assert (reply.status, reply.body) == (200, b"1")
    await house.until(lambda: script.gone == [0])
    assert events(house)[HedgeEvent.SENT] == events(house)[HedgeEvent.WON] == 1
    assert [(one.outstanding, one.prefilling) for one in views(house)] == [(0, 0)] * 3
    # A lost race is no fault of the replica.
    assert [one.num_broken for one in house.balancer.targets.values()] == [0, 0, 0]


async def test_the_head_of_a_stream_is_not_its_first_token(house):
    script = await balanced(house, "head", "stream", 200)
    caller = await house.caller()
    assert (await caller.ask()).body == b"data: 1\n\n"
    await house.until(lambda: script.gone == [0])
    # Nothing of the other stream follows on the client's connection.
    assert (await caller.ask()).body == b"2"


async def test_the_first_answer_cancels_the_second_attempt(house):
    script = await balanced(house, "late", "hold")
    asking = asyncio.create_task(house.ask())
    await house.until(lambda: script.num_asked == 2)
    script.may_go_on[0].set()
    assert (await asking).body == b"0"
    await house.until(lambda: script.gone == [1])
    assert (events(house)[HedgeEvent.SENT], events(house)[HedgeEvent.WON]) == (1, 0)
    page = (await house.ask("/metrics", method="GET")).body.decode()
    assert "banaserve_route_first_byte_seconds_count 1.0" in page


async def test_an_answer_in_time_is_not_hedged(house):
    script = await balanced(house, 200, hedge=NEVER)
    assert (await house.ask()).body == b"0"
    assert script.num_asked == 1
    assert not any(events(house).values())


@pytest.mark.parametrize("second", ["kill", 503, 500, 400])
async def test_the_first_replica_answers_if_the_second_one_fails(house, second):
    script = await balanced(house, "late", second)
    asking = asyncio.create_task(house.ask())
    await house.until(lambda: script.num_asked == 2 and len(house.balancer.fleet._flights) == 1)
    script.may_go_on[0].set()
    reply = await asking
    assert (reply.status, reply.body) == (200, b"0")
    assert script.num_asked == 2


@pytest.mark.parametrize("first", ["break", "busy"])
async def test_the_second_replica_answers_if_the_first_one_fails(house, first):
    script = await balanced(house, first, "late")
    asking = asyncio.create_task(house.ask())
    await house.until(lambda: script.num_asked == 2)
    script.may_go_on[0].set()
    await house.until(lambda: len(house.balancer.fleet._flights) == 1)
    script.may_go_on[1].set()
    assert (await asking).body == b"1"
    assert script.num_asked == 2
    assert events(house)[HedgeEvent.WON] == 1


@pytest.mark.parametrize("answers", [1, 2])
async def test_the_second_or_third_replica_answers_if_the_first_one_fails(house, answers):
    script = await balanced(house, "break", "late", "late", 200)
    house.balancer._dispatcher.hedger._budget = 2.0
    caller = await house.caller()
    asking = asyncio.create_task(caller.ask())
    for number in (2, 3):
        await house.until(lambda: script.num_asked == number)  # noqa: B023
        script.may_go_on[0].set()
    script.may_go_on[answers].set()
    assert (await asking).body == b"%d" % answers
    await house.until(lambda: not house.balancer.fleet._flights)
    # Nothing of the other answer follows on the client's connection.
    script.may_go_on[3 - answers].set()
    assert (await caller.ask()).body == b"3"


async def test_a_third_replica_is_asked_if_both_die(house):
    script = await balanced(house, "break", "break", 200)
    asking = asyncio.create_task(house.ask())
    await house.until(lambda: script.num_asked == 2)
    script.may_go_on[0].set()
    script.may_go_on[1].set()
    assert (await asking).body == b"2"


async def test_there_is_one_error_if_all_attempts_fail(house):
    script = await balanced(house, "break", "break", limits=LimitSettings(max_attempts=2))
    caller = await house.caller()
    asking = asyncio.create_task(caller.ask())
    await house.until(lambda: script.num_asked == 2)
    script.may_go_on[0].set()
    script.may_go_on[1].set()
    reply = await asking
    assert (reply.status, script.num_asked) == (502, 2)
    script.steps += [200]
    assert (await caller.ask()).body == b"2"


async def test_a_client_that_leaves_cancels_both_attempts(house):
    script = await balanced(house, "hold", "hold")
    caller = await house.caller()
    await caller.send(b"POST /v1/completions HTTP/1.1\r\nHost: b\r\nContent-Length: 0\r\n\r\n")
    await house.until(lambda: script.num_asked == 2)
    caller.hang_up()
    await house.until(lambda: sorted(script.gone) == [0, 1])
    assert not house.balancer.fleet._flights


async def test_only_a_share_of_the_requests_is_hedged(house):
    num_asked = 0

    async def late(asked):
        nonlocal num_asked
        num_asked += 1
        await settled.wait()
        await asked.answer()

    settled = asyncio.Event()
    replicas = [await house.replica(late) for _ in range(2)]
    balancer = await house.balance(
        *replicas, hedge=HedgeSettings(after="1ms", max_fraction=0.1), health=CALM
    )

    def decisions():
        # Which of two attempts that may answer at the same time wins is chance.
        return {
            one: balancer.metrics.hedges[one] for one in (HedgeEvent.SENT, HedgeEvent.OVER_BUDGET)
        }

    for number in range(1, 31):
        settled.clear()
        asking = asyncio.create_task(house.ask())
        await house.until(lambda: sum(decisions().values()) == number)  # noqa: B023
        settled.set()
        assert (await asking).status == 200
        await house.until(lambda: not balancer.fleet._flights)
    assert decisions() == {HedgeEvent.SENT: 3, HedgeEvent.OVER_BUDGET: 27}
    assert num_asked <= 33


class Waits:
    """A request for which no replica is free."""

    kind, is_over, waits_until_s = "any", False, float("inf")

    def place(self):
        return False


@pytest.mark.parametrize("why", ["pending", "prefilling", "queue", "alone"])
async def test_nothing_is_hedged_under_overload(house, why):
    script = await balanced(house, "late", hedge=NEVER, num_replicas=1 + (why != "alone"))
    asking = asyncio.create_task(house.ask())
    await house.until(lambda: script.num_asked == 1)
    other, waits = min(views(house), key=lambda one: one.outstanding), Waits()
    if why == "queue":
        house.balancer.queue.join(waits)
    elif why != "alone":
        setattr(other, why, 2)
    [proxied] = house.balancer._under_way
    proxied.hedge(proxied._hedge)
    expected = HedgeEvent.NO_REPLICA if why == "alone" else HedgeEvent.OVERLOADED
    assert house.balancer.metrics.hedges == {expected: 1}
    script.may_go_on[0].set()
    assert (await asking).body == b"0"
    house.balancer.queue.leave(waits)
    other.prefilling = 0


@pytest.mark.parametrize(
    ("path", "method"), [("/v1/responses", "POST"), ("/v1/models", "GET"), ("/tokenize", "POST")]
)
async def test_requests_that_may_leave_something_behind_are_not_hedged(house, path, method):
    script = await balanced(house, "late", 200)
    asking = asyncio.create_task(house.ask(path, method=method))
    await house.until(lambda: script.num_asked == 1)
    # A hedged request, sent later, is sent to a second replica earlier than this one ever is.
    script.steps[1:] = ["hold", 200]
    assert (await house.ask()).body == b"2"
    assert script.num_asked == 3
    script.may_go_on[0].set()
    assert (await asking).body == b"0"


async def test_a_single_attempt_is_not_hedged(house):
    script = await balanced(house, "late", 200, limits=LimitSettings(max_attempts=1))
    asking = asyncio.create_task(house.ask())
    await house.until(lambda: script.num_asked == 1)
    [proxied] = house.balancer._under_way
    proxied.hedge(proxied._hedge)
    script.may_go_on[0].set()
    assert (await asking).body == b"0"
    assert script.num_asked == 1


def answers(paces, has_token=True):
    """Outcomes of streams of 1000 prompt tokens; times are in units of 100 ms."""
    status = 200 * has_token
    return [AttemptOutcome(1.0, status, 1000, 100.0 * one, has_token, 0.0, True) for one in paces]


def test_a_quantile_is_learnt_for_prompts_of_any_length():
    times, draws = FirstTokenTimes(), random.Random(chosen_seed(1))
    few = answers([1.0] * 19)
    times.learn(few, 0.0)
    assert times.quantile_ms(0.95, 1000, True) is None
    recent = []
    for tokens in draws.choices(range(500, 20_000), k=400):
        usual_ms = 50 + 0.2 * tokens
        recent.append(
            AttemptOutcome(1.0, 200, tokens, usual_ms * draws.uniform(0.5, 1.5), True, 0.0, True)
        )
    times.learn(recent, 0.0)
    for tokens in (1000, 10_000):
        found, usual_ms = times.quantile_ms(0.9, tokens, True), 50 + 0.2 * tokens
        assert found == pytest.approx(1.4 * usual_ms, rel=0.25)
    assert times.quantile_ms(0.9, 1000, False) is None


def test_a_quantile_does_not_fall_since_slow_attempts_are_cancelled():
    times = FirstTokenTimes()
    recent = answers([1.0] * 90 + [4.0] * 10)
    times.learn(recent, 0.0)
    before_ms = times.quantile_ms(0.95, 1000, True)
    # All that were slower than the quantile have been hedged, and cancelled just after it.
    hedged = answers([1.0] * 90) + answers([4.0] * 10, has_token=False)
    times.learn(hedged, 1.0)
    assert times.quantile_ms(0.95, 1000, True) == pytest.approx(before_ms)
    # Clients that leave early say nothing.
    times.learn(hedged + answers([0.3] * 500, has_token=False), 1.0)
    assert times.quantile_ms(0.95, 1000, True) == pytest.approx(before_ms)
