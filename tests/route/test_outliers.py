"""Outliers among replicas: who is ejected, for how long, and who never is. In virtual time."""

from __future__ import annotations

from time import monotonic

import pytest

from banaserve.base.types import RequestId
from banaserve_route.balancer.config import BalancerSettings, HealthSettings, parse_endpoint
from banaserve_route.balancer.targets.ejection import OutlierEjector
from banaserve_route.balancer.targets.outliers import (
    OutlierReason,
    ReplicaRecord,
    choose_ejections,
    find_outliers,
)
from banaserve_route.balancer.targets.target import Ejection, Target
from banaserve_route.policies.interface import Request, RoutingDecision, RoutingReason
from counters import counted
from fleets import fleet_of

FAILURES, LATENCY = OutlierReason.FAILURES, OutlierReason.LATENCY
FEW = HealthSettings(outlier_request_volume=3)
GOOD = ReplicaRecord(10, 0, [1.0] * 10, [])
FAILS = ReplicaRecord(10, 4, [1.0] * 6, [])
SLOW = ReplicaRecord(10, 0, [6.0] * 10, [])
HANGS = ReplicaRecord(0, 0, [], [9.0] * 3)


@pytest.mark.parametrize(
    ("records", "found"),
    [
        ([GOOD, GOOD, GOOD], {}),
        ([GOOD, FAILS], {1: FAILURES}),
        ([GOOD, SLOW], {1: LATENCY}),
        ([GOOD, HANGS], {1: LATENCY}),
        ([SLOW, GOOD, FAILS, GOOD], {2: FAILURES, 0: LATENCY}),
        ([GOOD, SLOW, SLOW, GOOD], {1: LATENCY, 2: LATENCY}),
        # What all replicas do is not one replica's fault.
        ([FAILS, FAILS], {}),
        ([SLOW, SLOW], {}),
        ([SLOW], {}),
        # Few requests show nothing, of the replica or of the others.
        ([GOOD, ReplicaRecord(2, 2, [9.0, 9.0], [])], {}),
        ([ReplicaRecord(2, 0, [1.0, 1.0], []), SLOW], {}),
        # Some slow ones among many, and ones under way that are not late, are usual.
        ([GOOD, ReplicaRecord(10, 0, [9.0] * 4 + [1.0] * 6, [])], {}),
        ([GOOD, ReplicaRecord(10, 0, [1.0] * 3, [4.0] * 10)], {}),
        ([GOOD, ReplicaRecord(10, 0, [1.0] * 3, [9.0] * 4)], {1: LATENCY}),
    ],
)
def test_an_outlier_does_much_worse_than_the_others(records, found):
    outliers = find_outliers({str(place): one for place, one in enumerate(records)}, FEW)
    assert {int(name): one.reason for name, one in outliers.items()} == found
    assert [int(name) for name in outliers] == list(found)


def test_a_comparison_can_be_turned_off():
    records = {"a": GOOD, "b": FAILS, "c": SLOW, "d": GOOD}
    off = HealthSettings(outlier_failure_fraction=0.0, outlier_request_volume=3)
    assert {one.reason for one in find_outliers(records, off).values()} == {LATENCY}
    off = HealthSettings(outlier_latency_factor=0.0, outlier_request_volume=3)
    assert {one.reason for one in find_outliers(records, off).values()} == {FAILURES}


@pytest.mark.parametrize(
    ("num_replicas", "num_ejected", "num_up", "fraction", "num_chosen"),
    [
        (1, 0, 1, 1.0, 0),
        (2, 0, 2, 0.5, 1),
        (3, 0, 3, 0.5, 1),
        (5, 0, 5, 0.5, 2),
        (5, 1, 4, 0.5, 1),
        (5, 2, 3, 0.5, 0),
        (5, 3, 2, 0.5, 0),
        (4, 0, 1, 0.5, 0),
        (4, 0, 4, 1.0, 3),
        (4, 0, 4, 0.0, 0),
        (4, 0, 0, 1.0, 0),
    ],
)
def test_only_a_share_is_ejected_and_never_the_last(
    num_replicas, num_ejected, num_up, fraction, num_chosen
):
    health = HealthSettings(outlier_max_ejection_fraction=fraction, outlier_request_volume=3)
    records = {"good": GOOD, "also": GOOD, "and": GOOD, "slow": SLOW, "fails": FAILS, "more": SLOW}
    outliers = list(find_outliers(records, health).values())
    chosen = choose_ejections(outliers, num_replicas, num_ejected, num_up, health)
    assert list(chosen) == outliers[:num_chosen]


def test_ejections_in_a_row_grow_up_to_the_longest():
    ejection, now_s, durations = Ejection(), 1000.0, []
    for _ in range(4):
        durations.append(ejection.begin(LATENCY, now_s, 30.0, 80.0))
        now_s = ejection.until_s
        ejection.end(now_s)
        now_s += 79.0
    assert durations == [30.0, 60.0, 80.0, 80.0]
    assert ejection.begin(LATENCY, now_s + 1.0, 30.0, 80.0) == 30.0
    assert ejection.counts == {LATENCY: 5}


class Replicas:
    """Replicas in virtual time, which serve one request each a second; each has its own speed.

    Attributes:
        ms_a_token: Time to first token for each prompt token; None for a replica that hangs.
        prompt_tokens: Length of the prompts that a replica gets.
        fails: Replicas that answer 500.
    """

    def __init__(self, *names, **health):
        self.settings = BalancerSettings(health=HealthSettings(**health))
        self.fleet = fleet_of("round_robin", {name: {} for name in names})
        self.targets = {
            name: Target(self.fleet.get(name), parse_endpoint(f"http://{name}:1"), self.settings)
            for name in names
        }
        self.log, self.returned = [], []
        self.ejector = OutlierEjector(
            self.fleet, self.targets, self.log.append, lambda: self.returned.append(self.now_s)
        )
        self.ejector.take_settings(self.settings.health)
        self.now_s, self.number = 1000.0, 0
        self.ms_a_token = dict.fromkeys(names, 0.5)
        self.prompt_tokens = dict.fromkeys(names, 1000)
        self.fails = set()

    def serve(self, seconds):
        for _ in range(seconds):
            for name, target in self.targets.items():
                if target.refresh(self.now_s):
                    self._send(name, target)
            self.now_s += 1.0
            self.ejector.tick(self.now_s)

    def serve_until(self, holds):
        for _ in range(300):
            if holds():
                return
            self.serve(1)
        raise AssertionError(self.log)

    def _send(self, name, target):
        self.number += 1
        tokens, ms = self.prompt_tokens[name], self.ms_a_token[name]
        request = Request(RequestId(str(self.number)), tokens, is_streamed=True)
        decision = RoutingDecision(target.view.id, RoutingReason.TURN)
        flight = self.fleet.sent(request, decision, self.now_s)
        if ms is None:
            return
        now_s = self.now_s + tokens * ms / 1e3
        if name in self.fails:
            self.fleet.failed(flight, now_s)
            target.record(flight, 500, now_s)
        else:
            self.fleet.first_token(flight, now_s)
            self.fleet.finished(flight, now_s, 1)
            target.record(flight, 200, now_s)

    @property
    def ejected(self):
        return {name for name, one in self.targets.items() if one.ejection.is_active}


def test_a_replica_that_slows_down_is_ejected_and_comes_back_slowly():
    replicas = Replicas("a", "b", "c")
    replicas.serve(100)
    assert replicas.log == []
    replicas.ms_a_token["b"] = 5.0
    replicas.serve_until(lambda: replicas.ejected == {"b"})
    assert replicas.targets["b"].ejection.counts == {LATENCY: 1}
    assert "is ejected for 30 s: its first tokens take 10.0 times as long" in replicas.log[0]
    assert not replicas.targets["b"].view.is_available
    replicas.ms_a_token["b"] = 0.5
    replicas.serve_until(lambda: not replicas.ejected)
    assert "is back after its ejection" in replicas.log[1]
    assert replicas.targets["b"].is_starting
    assert len(replicas.returned) == 1
    replicas.serve(100)
    assert not replicas.targets["b"].is_starting
    assert len(replicas.log) == 2


def test_a_replica_that_stays_slow_is_ejected_for_longer():
    replicas = Replicas("a", "b")
    replicas.ms_a_token["b"] = 5.0
    replicas.serve(400)
    durations = [line.split(" for ")[1].split(" s")[0] for line in replicas.log if " for " in line]
    assert durations[:3] == ["30", "60", "90"]


def test_a_replica_that_hangs_is_ejected_though_it_answers_nothing():
    replicas = Replicas("a", "b", "c")
    replicas.serve(60)
    replicas.ms_a_token["c"] = None
    replicas.serve_until(lambda: replicas.ejected == {"c"})


def test_a_replica_with_long_prompts_is_not_ejected():
    replicas = Replicas("a", "b", "c")
    replicas.prompt_tokens["b"] = 30_000
    replicas.serve(300)
    assert replicas.log == []


def test_a_replica_that_fails_is_ejected_but_not_if_all_fail():
    replicas = Replicas("a", "b", "c")
    replicas.fails = {"b"}
    replicas.serve(30)
    assert replicas.ejected == {"b"}
    assert "100% of its requests failed, 0% at the others" in replicas.log[0]
    replicas = Replicas("a", "b", "c")
    replicas.fails = {"a", "b", "c"}
    replicas.serve(300)
    assert replicas.log == []


def test_the_ejected_come_back_early_if_no_other_replica_is_left():
    replicas = Replicas("a", "b")
    replicas.fails = {"b"}
    replicas.serve(30)
    assert replicas.ejected == {"b"}
    for _ in range(2):
        replicas.targets["a"].looked(False, 2, replicas.now_s)
    replicas.serve(1)
    assert replicas.ejected == set()
    assert replicas.log[-1].endswith("is back after its ejection: no other replica is left")


def test_replicas_of_other_models_are_not_compared():
    replicas = Replicas("a", "b", "c")
    replicas.targets["b"].view.models = frozenset({"large"})
    replicas.ms_a_token["b"] = 50.0
    replicas.serve(300)
    assert replicas.log == []


def test_a_restarted_replica_is_no_longer_ejected():
    replicas = Replicas("a", "b")
    replicas.fails = {"b"}
    replicas.serve(30)
    target = replicas.targets["b"]
    for is_well in (False, False, True):
        target.looked(is_well, 2, replicas.now_s)
    assert replicas.ejected == set()
    assert not target.recent


async def test_a_balancer_ejects_and_counts(house):
    async def fail(asked):
        await asked.answer(500)

    bad, well = await house.replica(fail), await house.replica()
    health = HealthSettings(
        interval_s=60, outlier_request_volume=5,
        outlier_base_ejection_s=600.0, outlier_max_ejection_s=600.0,
    )  # fmt: skip
    balancer = await house.balance(bad, well, health=health)
    for _ in range(10):
        await house.ask()
    balancer._ejector.tick(monotonic() + health.outlier_interval_s)
    assert balancer.targets[bad.id].ejection.is_active
    assert [(await house.ask()).status for _ in range(4)] == [200] * 4
    assert len(bad.asked) == 5
    assert counted(balancer, "target_ejections", target=bad.id, reason="failures") == 1
    page = (await house.ask("/metrics", method="GET")).body.decode()
    assert f'banaserve_route_target_ejected{{target="{bad.id}"}} 1.0' in page
    assert house.log == [
        f"replica {bad.url} is ejected for 600 s: 100% of its requests failed, 0% at the others"
    ]
