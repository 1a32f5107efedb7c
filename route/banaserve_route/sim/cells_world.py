"""Thousands of instances in regions: cells behind balancers, and machines that die and return."""

from __future__ import annotations

import gc
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple

from banaserve.base.errors import UserError
from banaserve.base.types import Distance, RequestId
from banaserve.orchestrator.control.costs.profile import Profile
from banaserve.sim.result import SIMULATED, percentile
from banaserve.sim.system import System, preset
from banaserve.sim.timeline import Timeline
from banaserve_route.policies.interface import Request
from banaserve_route.policies.registry import make
from banaserve_route.sim.balancer import RoundTrips, SimBalancer
from banaserve_route.sim.cell_replica import CellReplica
from banaserve_route.sim.cells_load import CellsLoad, RegionalRequest
from banaserve_route.sim.replica import BLOCK_TOKENS, UNIT_BYTES, ReplicaJob
from banaserve_route.sim.round_trips import FIVE_REGIONS, ROUND_TRIPS_MS

NEAR_MS = 2.0
"""Round trip within a region in ms: from clients to their balancer, and from it to a cell."""

BETWEEN_NODES = Distance(round_trip_s=2e-4, bytes_per_s=12.5e9)
"""Network path between two machines of one cell: 100 Gbit/s."""

_SLICE_S = 0.5
_PATIENCE_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CellsSetting:
    """Instances of all regions, the load of each, and failures.

    Attributes:
        instances: Total number of instances, distributed evenly over the regions.
        cell_size: Number of instances under one router and one controller; the last cell of a
            region may be smaller.
        node_size: Number of instances of one machine.
        load: Load of each region, with its arrivals per second.
        node_deaths: Number of machines that die, at times drawn evenly over the duration.
        back_after_s: Time after which dead machines serve again, empty, in seconds.
        notice_s: Time during which routers still send requests to a dead machine, in seconds.
        most_requests: Maximum number of requests of a cell per instance, which balancers respect.
        policy, options: Policy of the balancers and its options; options None: with ``skywalker``,
            requests go to a cell with fewer than ``most_requests`` for each instance, or else to a
            peer with room.
        migration: Migration policy of each cell's controller.
        between: Network path between two machines of one cell.
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
        """Return the round trip between every two regions in milliseconds, in both orders."""
        found = {(region, region): NEAR_MS for region in self.regions}
        for one, other in self._pairs():
            pair = (one, other) if (one, other) in self.round_trips_ms else (other, one)
            found[one, other] = found[other, one] = self.round_trips_ms[pair]
        return found

    def cell_sizes(self) -> list[int]:
        """Return the number of instances of each cell of a region."""
        each = self.instances // len(self.regions)
        sizes = [self.cell_size] * (each // self.cell_size)
        return [*sizes, each % self.cell_size] if each % self.cell_size else sizes

    def system(self, size: int) -> System:
        """Return the system of a cell of ``size`` instances, half of them for each role."""
        return preset(
            "banaserve",
            prefill=size // 2,
            decode=size // 2,
            cache="node",
            store_tokens=1_000_000,
            migration=self.migration,
        )


class NodeDeath(NamedTuple):
    """Death of a machine."""

    at_s: float
    region: str
    cell: int
    node: int


class RequestAccount(NamedTuple):
    """Account of the requests of a run: each is sent once and must end once.

    Attributes:
        num_doubled: Number of ends beyond the first end of a request.
        num_restarted: Number of legs that ran again because their instance died.
        num_sent_back: Number of requests that cells without instances sent back to balancers.
    """

    num_sent: int
    num_ended: int
    num_doubled: int
    num_restarted: int
    num_sent_back: int

    @property
    def num_lost(self) -> int:
        """Return the number of requests that never ended."""
        return self.num_sent - (self.num_ended - self.num_doubled)


class _Waiting:
    """Request as its client sees it."""

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
        balancers, cells: Balancer and cells of each region.
        deaths: Deaths of machines so far.
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
        """Return whether requests are still to arrive or to end."""
        return self._num_left > 0 or self._num_ended - self._num_doubled < self._num_sent

    def run(self, told: Callable[[float, int], None] | None = None) -> None:
        """Run until all requests have arrived and ended, while machines die.

        Args:
            told: Called periodically with the elapsed virtual seconds and the number of requests
                that have ended.
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
                # The turns of the controllers are spread over a period.
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
        """Count a request that has its last token."""
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
        """Return the account of the requests so far."""
        cells = [one.cell for each in self.cells.values() for one in each]
        return RequestAccount(
            self._num_sent,
            self._num_ended,
            self._num_doubled,
            sum(cell.num_restarted for cell in cells),
            sum(balancer.num_refused for balancer in self.balancers.values()),
        )

    def result(self) -> dict[str, Any]:
        """Return the figures of the run, ready for JSON; times are in virtual seconds."""
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
        """Send a request, and put only the region's next arrival on the timeline."""
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
    """Return the drawn deaths of machines, in the order of time."""
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
