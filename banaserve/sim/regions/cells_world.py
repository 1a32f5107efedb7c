"""Thousands of instances in regions: cells behind balancers, machines that die and come back."""

from __future__ import annotations

import gc
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple

from banaserve.costs.profile import Profile
from banaserve.errors import UserError
from banaserve.orchestrator.replicas.interface import Request
from banaserve.orchestrator.replicas.registry import make
from banaserve.sim.regions.balancer import RoundTrips, SimBalancer
from banaserve.sim.regions.cell_replica import CellReplica
from banaserve.sim.regions.cells_load import CellsLoad, RegionalRequest
from banaserve.sim.regions.replica import BLOCK_TOKENS, UNIT_BYTES, ReplicaJob
from banaserve.sim.regions.round_trips import FIVE_REGIONS, ROUND_TRIPS_MS
from banaserve.sim.result import SIMULATED, percentile
from banaserve.sim.system import System, preset
from banaserve.sim.timeline import Timeline
from banaserve.types import Distance, RequestId

NEAR_MS = 2.0
"""Within a region: from clients to their balancer, and from it to a cell."""

BETWEEN_NODES = Distance(round_trip_s=2e-4, bytes_per_s=12.5e9)
"""Two machines of one cell: 100 Gbit/s."""

_SLICE_S = 0.5
_PATIENCE_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CellsSetting:
    """Instances of all regions, the load of each, and failures.

    Attributes:
        instances: In all; dealt evenly over the regions.
        cell_size: Instances under one router and one controller; the last cell of a region may be
            smaller.
        node_size: Instances of one machine.
        rate_per_s: Arrivals of one region a second.
        node_deaths: Machines that die, at times drawn evenly over the duration.
        back_after_s: When they serve again, empty.
        notice_s: Until then routers send requests to a dead one.
        most_requests: Of a cell for each of its instances: balancers send no more there.
        policy, options: Of the balancers; None is where a cell has fewer than ``most_requests``
            for each instance, else where a peer has room (``skywalker``).
        migration: Of each cell's controller.
        between: Two machines of one cell.
    """

    instances: int = 10_000
    regions: tuple[str, ...] = FIVE_REGIONS
    cell_size: int = 32
    node_size: int = 8
    load: CellsLoad = field(default_factory=lambda: CellsLoad(duration_s=30.0, rate_per_s=4000.0))
    node_deaths: int = 20
    back_after_s: float = 10.0
    notice_s: float = 2.5
    most_requests: int = 16
    policy: str = "skywalker"
    options: Mapping[str, Any] | None = None
    migration: str = "repaired"
    between: Distance = BETWEEN_NODES
    round_trips_ms: Mapping[tuple[str, str], float] = field(default_factory=lambda: ROUND_TRIPS_MS)

    def __post_init__(self) -> None:
        if not self.regions or len(set(self.regions)) != len(self.regions):
            raise UserError(f"regions are {', '.join(self.regions)}: give each once, at least one")
        if self.cell_size < 2 or self.cell_size % 2:
            raise UserError(f"cell_size is {self.cell_size}: give an even number of instances")
        if self.instances % (2 * len(self.regions)) or self.instances < 1:
            raise UserError(
                f"instances is {self.instances}: give a multiple of {2 * len(self.regions)}, "
                "prefill and decode alike in each region"
            )
        if self.node_size < 1 or self.node_deaths < 0 or self.most_requests < 1:
            raise UserError("node_size and most_requests are at least 1, node_deaths at least 0")
        if not 0 <= self.notice_s < self.back_after_s:
            raise UserError(
                f"notice_s is {self.notice_s:g} and back_after_s {self.back_after_s:g}: a machine "
                "comes back after its death has been noticed"
            )
        for pair in self._pairs():
            if pair not in self.round_trips_ms and pair[::-1] not in self.round_trips_ms:
                raise UserError(f"there is no round trip between {pair[0]} and {pair[1]}")

    def _pairs(self) -> Iterator[tuple[str, str]]:
        return ((one, other) for one in self.regions for other in self.regions if one < other)

    def matrix(self) -> RoundTrips:
        """Returns the milliseconds between every two regions, either order."""
        found = {(region, region): NEAR_MS for region in self.regions}
        for one, other in self._pairs():
            pair = (one, other) if (one, other) in self.round_trips_ms else (other, one)
            found[one, other] = found[other, one] = self.round_trips_ms[pair]
        return found

    def cell_sizes(self) -> list[int]:
        """Returns the instances of each cell of a region."""
        each = self.instances // len(self.regions)
        sizes = [self.cell_size] * (each // self.cell_size)
        return [*sizes, each % self.cell_size] if each % self.cell_size else sizes

    def system(self, size: int) -> System:
        """Returns a cell of ``size`` instances, half of them for each role."""
        return preset(
            "banaserve",
            prefill=size // 2,
            decode=size // 2,
            cache="node",
            store_tokens=1_000_000,
            migration=self.migration,
        )


class NodeDeath(NamedTuple):
    """A machine that dies."""

    at_s: float
    region: str
    cell: int
    node: int


class RequestAccount(NamedTuple):
    """Requests of a run: each is sent once and has to end once.

    Attributes:
        num_doubled: Ends beyond the first of a request.
        num_restarted: Legs that ran again because their instance died.
        num_sent_back: Requests that a cell without instances sent back to its balancer.
    """

    num_sent: int
    num_ended: int
    num_doubled: int
    num_restarted: int
    num_sent_back: int

    @property
    def num_lost(self) -> int:
        """Requests that never ended."""
        return self.num_sent - (self.num_ended - self.num_doubled)


class _Waiting:
    """One request as its client sees it."""

    __slots__ = ("_world", "num_ends", "output_tokens", "region", "sent_s", "ttft_s")

    def __init__(self, world: CellsWorld, region: str, sent_s: float, output_tokens: int) -> None:
        self._world = world
        self.region, self.sent_s, self.output_tokens = region, sent_s, output_tokens
        self.ttft_s = -1.0
        self.num_ends = 0

    def first(self) -> None:
        self.ttft_s = self._world.timeline.now_s + NEAR_MS / 2000 - self.sent_s

    def done(self) -> None:
        self.num_ends += 1
        self._world.ended(self)


class CellsWorld:
    """All regions on one timeline.

    Attributes:
        balancers, cells: By region.
        deaths: Machines that have died so far.
    """

    def __init__(self, setting: CellsSetting, profile: Profile, seed: int) -> None:
        self.timeline = Timeline()
        self.setting, self._seed = setting, seed
        self.deaths: list[NodeDeath] = []
        self._num_left = 0
        self._num_sent = self._num_ended = self._num_doubled = 0
        self._ttft_s, self._tpot_s = array("d"), array("d")
        self._output_tokens = 0
        sizes = setting.cell_sizes()
        systems = {size: setting.system(size) for size in set(sizes)}
        self.cells = {
            region: [
                CellReplica(
                    f"{region}-{place:04}",
                    region,
                    self.timeline,
                    profile,
                    systems[size],
                    setting.node_size,
                    setting.between,
                    setting.most_requests * size,
                )
                for place, size in enumerate(sizes)
            ]
            for region in setting.regions
        }
        self.balancers = {region: self._balancer(region) for region in setting.regions}
        for region, balancer in self.balancers.items():
            balancer.connect([one for other, one in self.balancers.items() if other != region])

    def _balancer(self, region: str) -> SimBalancer:
        setting = self.setting
        options = setting.options
        if options is None:
            most = setting.most_requests * setting.cell_size
            usual = {"push": "outstanding", "max_outstanding": most, "peer_snapshots": False}
            options = usual if setting.policy == "skywalker" else {}
        policy = make(
            setting.policy, Random(f"{self._seed}/{region}"), unit_bytes=UNIT_BYTES, **options
        )
        return SimBalancer(
            region,
            policy,
            self.cells[region],
            setting.matrix(),
            self.timeline,
            goes_on=lambda: self.is_busy,
        )

    @property
    def is_busy(self) -> bool:
        """Whether requests are still to come, or to end."""
        return self._num_left > 0 or self._num_ended - self._num_doubled < self._num_sent

    def run(self, told: Callable[[float, int], None] | None = None) -> None:
        """Let all requests come and end, and machines die meanwhile.

        Args:
            told: Called now and then with the virtual seconds that are over, and the requests that
                have ended.
        """
        setting, timeline = self.setting, self.timeline
        for place, region in enumerate(setting.regions):
            peak_s = setting.load.duration_s * (place + 0.5) / len(setting.regions)
            arrivals = setting.load.requests(self._seed, region, peak_s)
            self._num_left += 1
            self._next_arrival((region, arrivals, None))
        for death in drawn_deaths(setting, self.cells, self._seed):
            timeline.at(death.at_s, self._die, death)
        if setting.migration != "still":
            cells = [one for each in self.cells.values() for one in each]
            period_s = setting.system(setting.cell_size).control_s
            for place, one in enumerate(cells):
                # Each controller has a clock of its own.
                timeline.at(period_s * (1 + place / len(cells)), self._control, (one, period_s))
        was_collecting = gc.isenabled()
        gc.disable()
        try:
            while self.is_busy and timeline.now_s < setting.load.duration_s + _PATIENCE_S:
                timeline.run(timeline.now_s + _SLICE_S)
                if told is not None:
                    told(timeline.now_s, self._num_ended)
        finally:
            if was_collecting:
                gc.enable()

    def ended(self, request: _Waiting) -> None:
        """A request has its last token."""
        self._num_ended += 1
        if request.num_ends > 1:
            self._num_doubled += 1
            return
        e2e_s = self.timeline.now_s + NEAR_MS / 2000 - request.sent_s
        self._ttft_s.append(request.ttft_s)
        if request.output_tokens > 1:
            self._tpot_s.append((e2e_s - request.ttft_s) / (request.output_tokens - 1))
        self._output_tokens += request.output_tokens

    def account(self) -> RequestAccount:
        """Returns what has become of the requests so far."""
        cells = [one.cell for each in self.cells.values() for one in each]
        return RequestAccount(
            self._num_sent,
            self._num_ended,
            self._num_doubled,
            sum(cell.num_restarted for cell in cells),
            sum(balancer.num_refused for balancer in self.balancers.values()),
        )

    def result(self) -> dict[str, Any]:
        """Returns the figures of the run, as JSON has them; times in virtual seconds."""
        cells = [one.cell for each in self.cells.values() for one in each]
        balancers = self.balancers.values()
        account = self.account()
        ttft_s, tpot_s = sorted(self._ttft_s), sorted(self._tpot_s)
        handed_over = sum(cell.num_handed_over for cell in cells)
        caches = {id(cache): cache for cell in cells for cache in cell.caches.values()}.values()
        asked = sum(cache.asked_tokens for cache in caches)
        now_s = self.timeline.now_s
        return {
            "time": SIMULATED,
            "num_instances": self.setting.instances,
            "num_cells": len(cells),
            "num_node_deaths": len(self.deaths),
            **account._asdict(),
            "num_lost": account.num_lost,
            "num_refused": sum(cell.num_refused for cell in cells),
            "num_moves": sum(len(cell.placing.done) for cell in cells),
            "forwarded_fraction": sum(one.num_forwarded for one in balancers)
            / max(1, account.num_sent),
            "handed_far_fraction": sum(cell.num_handed_far for cell in cells) / max(1, handed_over),
            "cache_hit_fraction": sum(cache.hit_tokens for cache in caches) / max(1, asked),
            "ttft_p50_s": percentile(ttft_s, 0.5),
            "ttft_p99_s": percentile(ttft_s, 0.99),
            "tpot_p50_s": percentile(tpot_s, 0.5),
            "tpot_p99_s": percentile(tpot_s, 0.99),
            "total_s": now_s,
            "output_tokens_per_s": self._output_tokens / now_s if now_s else 0.0,
            "request_messages": sum(one.num_requests for one in balancers),
            "report_messages": sum(one.num_reports for one in balancers),
            "num_events": self.timeline.num_events,
        }

    def _next_arrival(
        self, told: tuple[str, Iterator[RegionalRequest], RegionalRequest | None]
    ) -> None:
        """Only one arrival of each region waits on the timeline."""
        region, arrivals, request = told
        if request is not None:
            self._ask(region, request)
        upcoming = next(arrivals, None)
        if upcoming is None:
            self._num_left -= 1
        else:
            self.timeline.at(upcoming.at_s, self._next_arrival, (region, arrivals, upcoming))

    def _ask(self, region: str, asked: RegionalRequest) -> None:
        now_s = self.timeline.now_s
        self._num_sent += 1
        waiting = _Waiting(self, region, now_s, asked.output_tokens)
        request = Request(
            RequestId(str(self._num_sent)),
            asked.prompt_tokens,
            asked.prefix,
            asked.output_tokens,
            arrived_s=now_s,
        )
        output = bytes(max(1, asked.output_tokens // BLOCK_TOKENS) * UNIT_BYTES)
        job = ReplicaJob(request, output, waiting.first, waiting.done)
        self.timeline.after(NEAR_MS / 2000, self.balancers[region].take, job)

    def _control(self, told: tuple[CellReplica, float]) -> None:
        one, period_s = told
        one.cell.control()
        if self.is_busy:
            self.timeline.after(period_s, self._control, told)

    def _die(self, death: NodeDeath) -> None:
        setting = self.setting
        replica = self.cells[death.region][death.cell]
        names = replica.nodes[death.node]
        if not any(replica.cell.instances[name].engine.is_dead for name in names):
            self.deaths.append(death)
            replica.cell.kill_node(names, setting.back_after_s, setting.notice_s)


def drawn_deaths(
    setting: CellsSetting, cells: Mapping[str, list[CellReplica]], seed: int
) -> list[NodeDeath]:
    """Returns which machines die when, in the order of time."""
    draws = Random(f"{seed} deaths")
    everything = [
        (region, place, node)
        for region, each in cells.items()
        for place, one in enumerate(each)
        for node in range(len(one.nodes))
    ]
    found = [
        NodeDeath(draws.random() * setting.load.duration_s, *draws.choice(everything))
        for _ in range(setting.node_deaths)
    ]
    return sorted(found)
