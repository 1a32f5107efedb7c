"""Simulation of regions, their clients and a system of balancers for some virtual minutes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from banaserve.base.types import RequestId
from banaserve.sim.result import percentile
from banaserve.sim.timeline import Timeline
from banaserve_route.policies.interface import Request, State
from banaserve_route.policies.registry import make
from banaserve_route.sim.arrivals import Arrivals
from banaserve_route.sim.balancer import RoundTrips, SimBalancer
from banaserve_route.sim.programs import MakeProgram, Program, ProgramCall
from banaserve_route.sim.replica import (
    BLOCK_TOKENS,
    UNIT_BYTES,
    Accelerator,
    ReplicaJob,
    SharedStore,
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
        max_output_tokens: Number of output tokens that balancers expect of every answer, as from
            ``max_tokens``; 0 for the true number of each.
        has_store: True if the replicas of a region share a KV store.
    """

    replicas: Mapping[str, int]
    clients: Mapping[str, Sequence[tuple[int, MakeProgram]]]
    round_trips_ms: Mapping[tuple[str, str], float] = field(default_factory=dict)
    accelerator: Accelerator = field(default_factory=Accelerator)
    duration_s: float = 120.0
    start_within_s: float = 5.0
    arrivals: Mapping[str, Arrivals] = field(default_factory=dict)
    max_output_tokens: int = 0
    has_store: bool = False

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
    """Request as its client saw it; ``done_s`` is None if the time ran out first.

    Attributes:
        client: Name of the client.
        began_s: Start of the client's program plus all pauses since, so that ``first_s - began_s``
            is its time spent waiting for answers.
        hit_tokens: Number of prompt tokens that were not computed.
    """

    region: str
    sent_s: float
    prompt_tokens: int
    output_tokens: int
    first_s: float | None = None
    done_s: float | None = None
    hit_tokens: int = 0
    client: str = ""
    began_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """Result of a run.

    Attributes:
        most_outstanding: Maximum number of outstanding requests of each replica.
        busy_s: Time of each replica's steps, in seconds.
        states: State of each balancer's policy at the end.
    """

    duration_s: float
    records: list[Record]
    most_outstanding: list[int]
    busy_s: list[float] = field(default_factory=list)
    states: list[State] = field(default_factory=list)

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
    """Run ``system`` in ``setting``; with one seed, clients do the same under every system.

    The run ends when no client has anything left to do, or else after ``duration_s``.
    """
    timeline = Timeline()
    round_trips_ms = setting.matrix()
    stores = {region: SharedStore() if setting.has_store else None for region in setting.replicas}
    replicas = [
        SimReplica(f"{region}-{number}", region, setting.accelerator, timeline, stores[region])
        for region, count in sorted(setting.replicas.items())
        for number in range(count)
    ]
    starts = list(_starts(setting, seed))
    clients = _Clients(timeline, setting.max_output_tokens, len(starts))
    doors = _doors(setting, system, replicas, round_trips_ms, clients, seed)
    for region, name, make_program, start_s in starts:
        door = doors[region]
        one_way_s = round_trips_ms[region, door.region] / 2000
        program = make_program(Random(f"{seed}/{name}"), name)
        client = _Client(region, name, program, door, one_way_s, clients)
        timeline.at(start_s, client.begin)
    timeline.run(setting.duration_s)
    most = [replica.most_outstanding for replica in replicas]
    busy_s = [replica.busy_s for replica in replicas]
    states = [door.fleet.policy.state() for door in doors.values()]
    return RequestOutcome(setting.duration_s, clients.records, most, busy_s, states)


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
    clients: _Clients,
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
        return SimBalancer(
            region,
            policy,
            those,
            round_trips_ms,
            clients.timeline,
            system.staleness_s,
            lambda: clients.num_left > 0,
        )

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


@dataclass(slots=True)
class _Clients:
    """State that all clients of a run share."""

    timeline: Timeline
    max_output_tokens: int
    num_left: int
    records: list[Record] = field(default_factory=list)


class _Client:
    """Client that runs one program: it asks, waits for all answers or pauses, and continues."""

    def __init__(
        self,
        region: str,
        name: str,
        program: Program,
        door: SimBalancer,
        one_way_s: float,
        clients: _Clients,
    ) -> None:
        self._region = region
        self._name = name
        self._program = program
        self._door = door
        self._one_way_s = one_way_s
        self._clients = clients
        self._timeline = clients.timeline
        self._open = 0
        self._began_s = 0.0

    def begin(self, _: object) -> None:
        """Start the program."""
        self._began_s = self._timeline.now_s
        self._go_on()

    def _go_on(self, _: object = None) -> None:
        asks = next(self._program, None)
        if isinstance(asks, float):
            self._began_s += asks
            self._timeline.after(asks, self._go_on)
            return
        if not asks:
            self._clients.num_left -= 1
            return
        self._open = len(asks)
        for ask in asks:
            self._ask(ask)

    def _ask(self, ask: ProgramCall) -> None:
        num_tokens = len(ask.prompt) // UNIT_BYTES * BLOCK_TOKENS
        num_output = len(ask.output) // UNIT_BYTES * BLOCK_TOKENS
        now_s = self._timeline.now_s
        record = Record(self._region, now_s, num_tokens, num_output)
        record.client, record.began_s = self._name, self._began_s
        self._clients.records.append(record)
        request = Request(
            RequestId(str(len(self._clients.records))),
            num_tokens,
            ask.prompt,
            self._clients.max_output_tokens or num_output,
            session=ask.session,
            arrived_s=now_s,
        )

        def first(_: object) -> None:
            record.first_s = self._timeline.now_s

        def done(_: object) -> None:
            record.done_s, record.hit_tokens = self._timeline.now_s, job.hit_tokens
            self._open -= 1
            if not self._open:
                self._go_on()

        job = ReplicaJob(
            request,
            ask.output,
            lambda: self._timeline.after(self._one_way_s, first),
            lambda: self._timeline.after(self._one_way_s, done),
        )
        self._timeline.after(self._one_way_s, self._door.take, job)
