"""Simulation of regions, their clients and a system of balancers for some virtual minutes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from banaserve.base.types import RequestId
from banaserve.sim.report.result import percentile
from banaserve.sim.timeline import Timeline
from banaserve_route.policies.interface import Request
from banaserve_route.policies.registry import make
from banaserve_route.sim.arrivals import Arrivals
from banaserve_route.sim.balancer import RoundTrips, SimBalancer
from banaserve_route.sim.programs import MakeProgram, Program, ProgramCall
from banaserve_route.sim.replica import (
    BLOCK_TOKENS,
    UNIT_BYTES,
    Accelerator,
    ReplicaJob,
    SimReplica,
)

NEAR_MS = 2.0


@dataclass(frozen=True, slots=True)
class RegionSystem:
    """Layout of balancers and their policy.

    Attributes:
        central: True for one balancer, in the first region, for all replicas; False for one per
            region.
        forwards: True if the balancers of the regions know each other.
        staleness_s: Age of the counters that the policy sees, in seconds.
    """

    policy: str
    preset: str | None = None
    central: bool = False
    forwards: bool = True
    staleness_s: float = 0.0
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Setting:
    """Replicas and clients of each region, and the round trips between the regions.

    Attributes:
        clients: Numbers of clients of each region, each with the program that they run.
        arrivals: Arrivals of each region with their times and programs (``regions/arrivals``).
        round_trips_ms: Round trips between different regions in milliseconds, in either order.
        start_within_s: Time within which clients start at random, in seconds; with programs of one
            request, the whole duration gives an open loop.
    """

    replicas: Mapping[str, int]
    clients: Mapping[str, Sequence[tuple[int, MakeProgram]]]
    round_trips_ms: Mapping[tuple[str, str], float] = field(default_factory=dict)
    accelerator: Accelerator = field(default_factory=Accelerator)
    duration_s: float = 120.0
    start_within_s: float = 5.0
    arrivals: Mapping[str, Arrivals] = field(default_factory=dict)

    def matrix(self) -> RoundTrips:
        """Return the round trip between every two regions in milliseconds, in both orders."""
        names = sorted({*self.replicas, *self.clients, *self.arrivals})
        given = self.round_trips_ms
        return {
            (one, other): NEAR_MS
            if one == other
            else given[(one, other) if (one, other) in given else (other, one)]
            for one in names
            for other in names
        }


@dataclass(slots=True)
class Record:
    """Request as its client saw it; ``done_s`` is None if the time ran out first."""

    region: str
    sent_s: float
    prompt_tokens: int
    output_tokens: int
    first_s: float | None = None
    done_s: float | None = None
    hit_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """Result of a run.

    Attributes:
        most_outstanding: Maximum number of outstanding requests of each replica.
    """

    duration_s: float
    records: list[Record]
    most_outstanding: list[int]

    def done(self) -> list[Record]:
        """Return the requests that were answered."""
        return [one for one in self.records if one.done_s is not None]

    @property
    def num_censored(self) -> int:
        """Return the number of requests without a complete answer when the time was over."""
        return len(self.records) - len(self.done())

    @property
    def output_tokens_per_s(self) -> float:
        return sum(one.output_tokens for one in self.done()) / self.duration_s

    @property
    def weighted_tokens_per_s(self) -> float:
        """Return SkyWalker's throughput: prompt tokens plus twice the output tokens, per second."""
        tokens = sum(one.prompt_tokens + 2 * one.output_tokens for one in self.done())
        return tokens / self.duration_s

    @property
    def hit_fraction(self) -> float:
        """Return the share of prompt tokens found in a cache."""
        tokens = sum(one.prompt_tokens for one in self.done())
        return sum(one.hit_tokens for one in self.done()) / max(1, tokens)

    def ttft_s(self, fraction: float) -> float:
        """Return a quantile of the time to first token; unfinished waits count up to the end."""
        return percentile(sorted(self._ttft_s()), fraction)

    @property
    def mean_ttft_s(self) -> float:
        """Return the mean time to first token; unfinished waits count up to the end."""
        times = self._ttft_s()
        return sum(times) / max(1, len(times))

    @property
    def mean_e2e_s(self) -> float:
        """Return the mean end-to-end time; unfinished requests count up to the end."""
        times = self._e2e_s()
        return sum(times) / max(1, len(times))

    def e2e_s(self, fraction: float) -> float:
        """Return a quantile of the end-to-end time; unfinished requests count up to the end."""
        return percentile(sorted(self._e2e_s()), fraction)

    def _ttft_s(self) -> list[float]:
        ends = [self.duration_s if one.first_s is None else one.first_s for one in self.records]
        return [end - one.sent_s for end, one in zip(ends, self.records, strict=True)]

    def _e2e_s(self) -> list[float]:
        ends = [self.duration_s if one.done_s is None else one.done_s for one in self.records]
        return [end - one.sent_s for end, one in zip(ends, self.records, strict=True)]


def simulate(setting: Setting, system: RegionSystem, seed: int) -> RequestOutcome:
    """Run ``system`` in ``setting``; with one seed, clients do the same under every system."""
    timeline = Timeline()
    round_trips_ms = setting.matrix()
    replicas = [
        SimReplica(f"{region}-{number}", region, setting.accelerator, timeline)
        for region, count in sorted(setting.replicas.items())
        for number in range(count)
    ]
    doors = _doors(setting, system, replicas, round_trips_ms, timeline, seed)
    records: list[Record] = []
    for region, name, make_program, start_s in _starts(setting, seed):
        door = doors[region]
        one_way_s = round_trips_ms[region, door.region] / 2000
        program = make_program(Random(f"{seed}/{name}"), name)
        client = _Client(region, program, door, one_way_s, timeline, records)
        timeline.at(start_s, client.go_on)
    timeline.run(setting.duration_s)
    most = [replica.most_outstanding for replica in replicas]
    return RequestOutcome(setting.duration_s, records, most)


def _starts(setting: Setting, seed: int) -> Iterator[tuple[str, str, MakeProgram, float]]:
    """Yield region, name, program and start of every client."""
    for region, groups in sorted(setting.clients.items()):
        for place, (count, program) in enumerate(groups):
            for number in range(count):
                name = f"{region}-{place}-{number}"
                start = Random(f"{seed}/start/{name}").random()
                yield region, name, program, start * setting.start_within_s
    for region, arrivals in sorted(setting.arrivals.items()):
        for number, (start_s, program) in enumerate(arrivals):
            yield region, f"{region}-{number}", program, start_s


def _doors(
    setting: Setting,
    system: RegionSystem,
    replicas: Sequence[SimReplica],
    round_trips_ms: RoundTrips,
    timeline: Timeline,
    seed: int,
) -> dict[str, SimBalancer]:
    """Return the balancer that each region's clients use."""

    def balancer(region: str, those: Sequence[SimReplica]) -> SimBalancer:
        policy = make(
            system.policy,
            Random(f"{seed}/{region}"),
            preset=system.preset,
            unit_bytes=UNIT_BYTES,
            **system.options,
        )
        return SimBalancer(region, policy, those, round_trips_ms, timeline, system.staleness_s)

    if system.central:
        only = balancer(next(iter(setting.replicas)), replicas)
        return dict.fromkeys([*setting.clients, *setting.arrivals], only)
    doors = {
        region: balancer(region, [one for one in replicas if one.region == region])
        for region in setting.replicas
    }
    if system.forwards:
        for region, door in doors.items():
            door.connect([peer for other, peer in doors.items() if other != region])
    return doors


class _Client:
    """Client that runs one program: it asks, waits for all answers, and continues."""

    def __init__(
        self,
        region: str,
        program: Program,
        door: SimBalancer,
        one_way_s: float,
        timeline: Timeline,
        records: list[Record],
    ) -> None:
        self._region = region
        self._program = program
        self._door = door
        self._one_way_s = one_way_s
        self._timeline = timeline
        self._records = records
        self._open = 0

    def go_on(self, _: object = None) -> None:
        asks = next(self._program, [])
        self._open = len(asks)
        for ask in asks:
            self._ask(ask)

    def _ask(self, ask: ProgramCall) -> None:
        num_tokens = len(ask.prompt) // UNIT_BYTES * BLOCK_TOKENS
        num_output = len(ask.output) // UNIT_BYTES * BLOCK_TOKENS
        now_s = self._timeline.now_s
        record = Record(self._region, now_s, num_tokens, num_output)
        self._records.append(record)
        request = Request(
            RequestId(str(len(self._records))),
            num_tokens,
            ask.prompt,
            num_output,
            session=ask.session,
            arrived_s=now_s,
        )

        def first(_: object) -> None:
            record.first_s = self._timeline.now_s

        def done(_: object) -> None:
            record.done_s, record.hit_tokens = self._timeline.now_s, job.hit_tokens
            self._open -= 1
            if not self._open:
                self.go_on()

        job = ReplicaJob(
            request,
            ask.output,
            lambda: self._timeline.after(self._one_way_s, first),
            lambda: self._timeline.after(self._one_way_s, done),
        )
        self._timeline.after(self._one_way_s, self._door.take, job)
