"""The queue and the circuit breaker, in virtual time."""

from __future__ import annotations

from itertools import pairwise

import pytest

from banaserve_route.balancer.config import BalancerSettings, HealthSettings, parse_endpoint
from banaserve_route.balancer.requests.queue import REFUSALS_AT_A_TIME, RequestQueue
from banaserve_route.balancer.targets.target import Breaker, Target
from banaserve_route.policies.interface import ReplicaId, ReplicaView


class One:
    def __init__(self, name, kind, places, until_s=10.0):
        self.name, self.kind, self.waits_until_s = name, kind, until_s
        self.is_over = False
        self._places = places

    def place(self):
        if self._places.get(self.kind, 0) == 0:
            return False
        self._places[self.kind] -= 1
        self._places["went"].append(self.name)
        return True

    def waited_too_long(self):
        self._places["late"].append(self.name)


@pytest.fixture
def places():
    return {"went": [], "late": []}


def fill(queue, places, names):
    made = [One(name, name[0], places) for name in names]
    for one in made:
        queue.join(one)
    return made


def test_nobody_overtakes_within_a_lane_and_lanes_do_not_hold_each_other_up(places):
    queue = RequestQueue()
    fill(queue, places, ["a1", "b1", "a2", "b2"])
    places["b"] = 1
    queue.start_pass()
    assert places["went"] == ["b1"]
    places["a"] = 5
    queue.start_pass()
    assert places["went"] == ["b1", "a1", "a2"]
    assert len(queue) == 1
    assert queue.has_waiting("b")
    assert not queue.has_waiting("a")


def test_lanes_take_turns(places):
    queue = RequestQueue()

    class Few(One):
        def place(self):
            self.kind, own = "shared", self.kind
            try:
                return super().place()
            finally:
                self.kind = own

    for name in ("a1", "a2", "a3", "b1", "c1"):
        queue.join(Few(name, name[0], places))
    for number, expected in enumerate((["a1"], ["a1", "b1"], ["a1", "b1", "c1"])):
        places["shared"] = 1
        queue.start_pass()
        assert places["went"] == expected, number
    places["shared"] = 2
    queue.start_pass()
    assert places["went"][3:] == ["a2", "a3"]


def test_a_line_of_very_many_lanes_is_asked_a_part_at_a_time_and_all_of_it(places):
    queue, asked = RequestQueue(), []

    class Refused(One):
        def place(self):
            asked.append(self.name)
            return super().place()

    for number in range(1000):
        queue.join(Refused(str(number), number, places))
    places[999] = 1
    is_more, parts = queue.start_pass(), []
    while is_more:
        parts.append(len(asked))
        is_more = queue.continue_pass()
    assert max(later - before for before, later in pairwise([0, *parts])) <= REFUSALS_AT_A_TIME
    assert sorted(asked, key=int) == [str(number) for number in range(1000)]
    assert places["went"] == ["999"]


def test_what_becomes_free_in_the_middle_is_offered_to_all_again(places):
    queue = RequestQueue()
    fill(queue, places, [f"{letter}1" for letter in "abc"])
    for number in range(200):
        queue.join(One(str(number), number, places))
    assert queue.start_pass()
    places["a"] = 1
    while queue.start_pass():
        if places["went"]:
            break
    assert places["went"] == ["a1"]


def test_who_has_waited_before_stands_in_front(places):
    queue = RequestQueue()
    fill(queue, places, ["a1", "a2"])
    queue.join(One("a0", "a", places), at_front=True)
    places["a"] = 3
    queue.start_pass()
    assert places["went"] == ["a0", "a1", "a2"]


def test_who_is_over_or_late_leaves(places):
    queue = RequestQueue()
    first, second, third = fill(queue, places, ["a1", "a2", "a3"])
    first.is_over, second.waits_until_s = True, 1.0
    queue.sweep(1.0)
    assert places["late"] == ["a2"]
    queue.leave(third)
    queue.leave(third)
    queue.start_pass()
    assert len(queue) == 0
    assert places["went"] == []


def test_a_circuit_opens_after_failures_in_a_row_only():
    breaker = Breaker(3, 1.0, 4.0)
    for _ in range(5):
        breaker.failed(0.0)
        breaker.failed(0.0)
        breaker.succeeded()
    assert not breaker.is_open
    for _ in range(3):
        breaker.failed(0.0)
    assert breaker.is_open
    assert not breaker.allows(0.9)
    assert breaker.allows(1.0)


def test_one_request_is_the_trial_and_pauses_grow_up_to_a_limit():
    breaker = Breaker(1, 1.0, 4.0)
    now_s = 0.0
    breaker.failed(now_s)
    pauses = []
    for _ in range(4):
        pauses.append(breaker.retry_at_s - now_s)
        now_s = breaker.retry_at_s
        assert breaker.allows(now_s)
        breaker.sent()
        assert not breaker.allows(now_s)
        breaker.failed(now_s)
    assert pauses == [1.0, 2.0, 4.0, 4.0]
    breaker.sent()
    breaker.succeeded()
    assert breaker.allows(now_s)
    breaker.failed(now_s)
    assert breaker.retry_at_s - now_s == 1.0


def test_a_cancelled_trial_lets_the_next_one_try():
    breaker = Breaker(1, 1.0, 4.0)
    breaker.failed(0.0)
    breaker.sent()
    breaker.given_up()
    assert breaker.allows(1.0)


def test_a_replica_that_comes_back_takes_ever_more_requests_at_once():
    settings = BalancerSettings(health=HealthSettings(slow_start_s=10.0))
    view = ReplicaView(ReplicaId("a"), "")
    target = Target(view, parse_endpoint("http://127.0.0.1:1"), settings)

    def room(now_s):
        view.outstanding = 0
        while view.outstanding < 100 and target.refresh(now_s):
            view.outstanding += 1
        return view.outstanding

    assert room(0.0) == 100
    for is_well in (False, False, True):
        target.looked(is_well, 2, 0.0)
    assert [room(at_s) for at_s in (0.0, 1.0, 5.0, 9.9)] == [1, 7, 32, 63]
    assert target.is_starting
    assert room(10.0) == 100
    assert not target.is_starting
