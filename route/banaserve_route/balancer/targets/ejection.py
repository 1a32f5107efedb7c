"""Ejector that compares a balancer's replicas at intervals, and takes outliers out for a time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import chain

from banaserve_route.balancer.config import MAX_COMPARED, HealthSettings
from banaserve_route.balancer.targets.outcomes import AttemptOutcome, FirstTokenTimes, outcome_of
from banaserve_route.balancer.targets.outliers import (
    ReplicaRecord,
    choose_ejections,
    find_outliers,
)
from banaserve_route.balancer.targets.target import Target
from banaserve_route.policies.fleet import Fleet
from banaserve_route.policies.interface import ReplicaId

_WINDOW_INTERVALS = 6
"""Number of intervals after which an outcome no longer counts."""


class OutlierEjector:
    """Ejector of replicas that answer, but fail much more often or are much slower than others.

    Only replicas of one region that serve the same models are compared.

    Attributes:
        times: Usual times to first token.
    """

    def __init__(
        self,
        fleet: Fleet,
        targets: Mapping[str, Target],
        log: Callable[[str], None],
        on_return: Callable[[], None],
    ) -> None:
        """``on_return`` is called after a replica has come back."""
        self.times = FirstTokenTimes()
        self._fleet, self._targets, self._log, self._on_return = fleet, targets, log, on_return
        self._health = HealthSettings()
        self._compared_s = 0.0

    def take_settings(self, health: HealthSettings) -> None:
        """Apply these settings from now on; the ends of ejections stay as they are."""
        self._health = health

    def tick(self, now_s: float) -> None:
        """Bring replicas back whose time is over; compare all if the interval has passed."""
        groups = _comparable(one for one in self._targets.values() if not one.is_peer)
        for group in groups:
            self._bring_back(group, now_s)
        if now_s - self._compared_s >= self._health.outlier_interval_s:
            self._compare(groups, now_s)

    def _bring_back(self, group: list[Target], now_s: float) -> None:
        # Better a slow replica than none.
        is_needed = not any(one.is_up for one in group)
        for one in group:
            if one.ejection.is_active and (is_needed or now_s >= one.ejection.until_s):
                one.come_back(now_s, self._health.outlier_interval_s)
                why = ": no other replica is left" if is_needed else ""
                self._log(f"{one.name} is back after its ejection{why}")
                self._on_return()

    def _compare(self, groups: list[list[Target]], now_s: float) -> None:
        recent = self._recent(now_s)
        self.times.learn([*chain(*recent.values())], self._compared_s)
        self._compared_s = now_s
        for group in groups:
            records = {
                one.view.id: self._record(recent[one.view.id])
                for one in group
                if one.is_healthy and not one.ejection.is_active
            }
            self._eject(group, records, now_s)

    def _recent(self, now_s: float) -> dict[ReplicaId, list[AttemptOutcome]]:
        """Return the recent outcomes of each replica, with those of requests under way."""
        from_s = now_s - _WINDOW_INTERVALS * self._health.outlier_interval_s
        recent: dict[ReplicaId, list[AttemptOutcome]] = {}
        for target in self._targets.values():
            newest = [one for one in target.recent or () if one.at_s >= from_s][-MAX_COMPARED:]
            recent[target.view.id] = newest
            if target.recent is not None:
                target.recent = newest[:]
        for flight in self._fleet.waiting_flights():
            sent_to = self._targets.get(flight.target)
            if sent_to is not None and flight.sent_s >= sent_to.judged_since_s:
                recent[flight.target].append(outcome_of(flight, 0, now_s))
        return recent

    def _record(self, outcomes: list[AttemptOutcome]) -> ReplicaRecord:
        timed = [one for one in outcomes if one.waited_ms is not None]
        return ReplicaRecord(
            num_answers=sum(one.status > 0 for one in outcomes),
            num_failures=sum(one.status >= 500 for one in outcomes),
            paces=[self.times.pace(one) for one in timed if one.has_token],
            waits=[self.times.pace(one) for one in timed if not one.has_token],
        )

    def _eject(
        self, group: list[Target], records: Mapping[ReplicaId, ReplicaRecord], now_s: float
    ) -> None:
        health = self._health
        outliers = list(find_outliers(records, health).values())
        num_ejected = sum(one.ejection.is_active for one in group)
        num_up = sum(one.is_up for one in group)
        for one in choose_ejections(outliers, len(group), num_ejected, num_up, health):
            target = self._targets[one.replica]
            for_s = target.eject(one.reason, now_s, health)
            self._log(f"{target.name} is ejected for {for_s:g} s: {one.why}")


def _comparable(targets: Iterable[Target]) -> list[list[Target]]:
    """Return the replicas in groups of one region and the same models."""
    groups: dict[tuple[str, frozenset[str]], list[Target]] = defaultdict(list)
    for one in targets:
        groups[one.view.region, one.view.models].append(one)
    return list(groups.values())
