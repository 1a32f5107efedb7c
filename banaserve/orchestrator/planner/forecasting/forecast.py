"""Forecast of an arrangement: a simulation of the last minute's requests under it.

The simulator is the model: it shares step costs and routing with the real server. Requests under
way come first, at their instances and with their progress; then the recent requests arrive again,
with their observed lengths. The output length of an unfinished request is drawn from the ended
requests and from lengths already drawn, longest first (the Kaplan-Meier estimator, as Efron's
redistribution to the right).
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf, isinf, log, sqrt
from typing import NamedTuple

from banaserve.base.types import (
    InstanceId,
    ModulePlacement,
    MoveModule,
    ObservedRequest,
    Role,
    Step,
)
from banaserve.orchestrator.control.costs.profile import Profile
from banaserve.orchestrator.control.model.learnt_time import StepWork
from banaserve.sim.cluster.cell import Cell, Far
from banaserve.sim.instances.instance import SimInstance
from banaserve.sim.request import SimRequest
from banaserve.sim.system import System
from banaserve.sim.timeline import Timeline

_KNOWN_LENGTHS = 256
_GOLDEN = 0.6180339887498949
_TICK_S = 1.0
_STEEPNESS = 10
_MARGIN_SHARE = 0.15

_BEGINNING = 0.25
"""Share of the arrivals' time that ``slowdown`` leaves out: its queues are those of before."""


@dataclass(frozen=True, slots=True)
class ServiceLimits:
    """SLO limits of a request, in seconds; None for no limit. With neither, latency counts."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    def value(self, ttft_s: float, tpot_s: float, e2e_s: float) -> float:
        """Return the worth of a request; greater is better.

        A forecast errs, so a request just within its limits counts for about a half, and its margin
        still counts a little if it is well within its limits.
        """
        if self.ttft_s is None and self.tpot_s is None:
            return -log(max(e2e_s, 1e-3))
        ratio = max(
            ttft_s / self.ttft_s if self.ttft_s is not None else 0.0,
            tpot_s / self.tpot_s if self.tpot_s is not None else 0.0,
        )
        within = 1 / (1 + ratio**_STEEPNESS) if ratio < 100 else 0.0
        return (1 - _MARGIN_SHARE) * within + _MARGIN_SHARE / (1 + sqrt(ratio))


class FutureRequest(NamedTuple):
    """A request of a forecast.

    Attributes:
        at_s: Time of arrival since the start of the forecast, in seconds; 0 if it is under way.
        generated: Number of tokens generated; with at least one, the request decodes at
            ``instance``.
        age_s: Time since the arrival of a request under way, in seconds.
        first_age_s: Time since its first token, in seconds; None without one.
        source: Number of the observed request: requests that arrive repeatedly share it.
    """

    at_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    generated: int = 0
    age_s: float = 0.0
    instance: InstanceId | None = None
    first_age_s: float | None = None
    source: int = 0


class InstanceUse(NamedTuple):
    """Use of an instance while requests arrive.

    Attributes:
        busy_fraction: Share of the time in which the instance computes.
        short_fraction: Share of the time in which a request waits for KV memory.
        kv_tokens: Mean number of KV tokens in use.
        work: Work of the mean step.
    """

    instance: InstanceId
    busy_fraction: float
    short_fraction: float
    kv_tokens: float
    work: StepWork


class Forecast(NamedTuple):
    """Worth of each request, requests under way first.

    Attributes:
        arrivals_s, ends_s: Arrival and end of each request, in seconds; the end is infinite if it
            is not within the forecast.
        use: Use of each instance; empty if not requested.
    """

    values: tuple[float, ...]
    arrivals_s: tuple[float, ...] = ()
    ends_s: tuple[float, ...] = ()
    use: tuple[InstanceUse, ...] = ()

    @property
    def mean(self) -> float:
        return sum(self.values) / len(self.values) if self.values else 0.0


def future_of(
    requests: Sequence[ObservedRequest],
    since_s: float,
    now_s: float,
    horizon_s: float,
    max_requests: int,
    dilation: float = 1.0,
) -> list[FutureRequest]:
    """Return the requests to simulate: those under way, then those that arrived since ``since_s``.

    The latter arrive repeatedly until the horizon, so that the forecast shows the growth of a queue
    even if the load has not lasted long.

    Args:
        horizon_s: Duration of arrivals in the time of the forecast, as all times of the result.
        max_requests: Maximum number of requests that arrive.
        dilation: Seconds of the requests' clock in one second of the forecast.
    """
    lengths = _output_lengths(requests)
    under_way = [
        FutureRequest(
            0.0,
            request.prompt_tokens,
            request.cached_tokens,
            max(lengths[place], request.output_tokens + 1),
            request.output_tokens,
            (now_s - request.arrival_s) / dilation,
            request.instance,
            None if request.first_s is None else (now_s - request.first_s) / dilation,
            place,
        )
        for place, request in enumerate(requests)
        if request.end_s is None
    ]
    once = [
        FutureRequest(
            (request.arrival_s - since_s) / dilation,
            request.prompt_tokens,
            request.cached_tokens,
            lengths[place],
            source=place,
        )
        for place, request in enumerate(requests)
        if since_s <= request.arrival_s < now_s
    ]
    lasts_s = (now_s - since_s) / dilation
    num_times = ceil(min(horizon_s / lasts_s, max_requests / len(once))) if once else 0
    arriving = [
        one._replace(at_s=one.at_s + turn * lasts_s) for turn in range(num_times) for one in once
    ]
    return under_way + arriving[:max_requests]


def _output_lengths(requests: Sequence[ObservedRequest]) -> list[int]:
    """Return the output tokens of each request: as observed, or drawn if it has not ended."""
    known = sorted(request.output_tokens for request in requests if request.end_s is not None)
    lengths = [request.output_tokens for request in requests]
    open_places = [place for place, request in enumerate(requests) if request.end_s is None]
    open_places.sort(key=lambda place: (-requests[place].output_tokens, place))
    for number, place in enumerate(open_places):
        generated = requests[place].output_tokens
        first = bisect_right(known, generated)
        longer = len(known) - first
        if longer:
            share = (number + 1) * _GOLDEN % 1.0
            lengths[place] = known[first + int(share * longer)]
        else:
            lengths[place] = generated + max(8, generated // 2)
        insort(known, lengths[place])
    return lengths


def forecast(
    profile: Profile,
    system: System,
    roles: Sequence[tuple[InstanceId, Role, int]],
    future: Sequence[FutureRequest],
    limits: ServiceLimits,
    patience_s: float,
    steps: Sequence[Step] = (),
    placements: Sequence[ModulePlacement] = (),
    *,
    watch: bool = False,
    far: Far | None = None,
) -> Forecast:
    """Simulate ``future`` on the instances of ``roles``.

    Args:
        system: Routing, hand-over, limits of the engines, and the gain of modules that are away.
        roles: Id, role and step size in tokens of each instance.
        patience_s: Time after the last arrival at which the simulation stops; requests that are not
            done count as ending then.
        steps: Steps of a plan, which begins at once.
        placements: Modules that are away already.
        watch: True to return the use of each instance.
        far: Network paths between instances on different machines, in the profile's time, for
            hand-overs of KV and messages of modules.
    """
    timeline = Timeline()
    cell = Cell(
        timeline,
        profile,
        replace(system, migration="still", migration_options={}),
        [(name, role) for name, role, _ in roles],
        None,
        0,
        lambda _: None,
        far=far,
    )
    for name, _, step_tokens in roles:
        cell.instances[name].set_step_tokens(step_tokens)
    cell.placing.put(placements)
    cell.placing.begin_in_order(steps)
    cell.expect(one.output_tokens for one in future[:_KNOWN_LENGTHS])
    coming: list[tuple[FutureRequest, SimRequest]] = []
    for number, one in enumerate(future):
        request = SimRequest(number, one.at_s, one.prompt_tokens, one.output_tokens)
        request.cached_tokens = min(one.cached_tokens, one.prompt_tokens - 1)
        request.to_compute = one.prompt_tokens - request.cached_tokens
        coming.append((one, request))
        if one.generated and one.instance in cell.instances:
            cell.adopt(request, one.instance, one.generated)
        else:
            timeline.at(one.at_s, cell.submit, request)
    arrived_s = future[-1].at_s if future else 0.0
    end_s = arrived_s + patience_s
    gauges = [_Gauge(one, timeline) for one in cell.instances.values()] if watch else []
    has_modules = placements or any(isinstance(step.action, MoveModule) for step in steps)
    if has_modules:
        _every_second(timeline, lambda: _bend(cell), end_s)
    for gauge in gauges:
        _every_second(timeline, gauge.sample, arrived_s)
    timeline.run(until_s=end_s)
    values = []
    for one, request in coming:
        done_s = request.end_s if request.end_s >= 0 else end_s
        began_s = one.at_s - one.age_s
        first_s = request.first_s if request.first_s >= 0 else end_s
        if one.first_age_s is not None:
            first_s = -one.first_age_s
        tokens = max(1, request.output_tokens - 1)
        values.append(
            limits.value(
                first_s - began_s,
                (done_s - first_s) / tokens if request.output_tokens > 1 else 0.0,
                done_s - began_s,
            )
        )
    return Forecast(
        tuple(values),
        tuple(one.at_s for one in future),
        tuple(request.end_s if request.end_s >= 0 else inf for _, request in coming),
        tuple(gauge.use() for gauge in gauges),
    )


class _Gauge:
    """Samples of the use of one instance."""

    def __init__(self, instance: SimInstance, timeline: Timeline) -> None:
        self._instance = instance
        self._timeline = timeline
        self._num_samples = 0
        self._num_short = 0
        self._kv_tokens = 0.0
        self._works: list[StepWork] = []
        self._busy_fraction = 0.0

    def sample(self) -> None:
        engine = self._instance.engine
        self._num_samples += 1
        self._num_short += engine.is_short_of_kv
        self._kv_tokens += engine.used_tokens
        self._works.append(engine.work)
        self._busy_fraction = engine.busy()[0] / self._timeline.now_s

    def use(self) -> InstanceUse:
        count = max(1, self._num_samples)
        works = self._works
        work = StepWork(
            sum(one.prefill_tokens for one in works) / count,
            sum(one.prefill_pairs for one in works) / count,
            sum(one.decode_requests for one in works) / count,
            sum(one.context_tokens for one in works) / count,
        )
        return InstanceUse(
            self._instance.id,
            min(1.0, self._busy_fraction),
            self._num_short / count,
            self._kv_tokens / count,
            work,
        )


def _bend(cell: Cell) -> None:
    """Adapt the costs of modules away to the present load of their hosts."""
    cell.view()  # updates the smoothed load of each instance
    cell.placing.bend()


def _every_second(timeline: Timeline, happen: Callable[[], None], until_s: float) -> None:
    def tick(_: object) -> None:
        happen()
        if timeline.now_s + _TICK_S <= until_s:
            timeline.after(_TICK_S, tick)

    timeline.after(_TICK_S, tick)


def slowdown(one: Forecast, other: Forecast) -> float:
    """Return how much slower ``one`` works than ``other``, as a share of time; below 0 if faster.

    In an overload, latency limits alone do not show this loss: an arrangement that serves some
    requests well and falls behind with the others looks better than one that keeps up, until the
    load ends.

    The result is the slope, over the arrival times, of the difference between the k-th end in
    ``one`` and the k-th end in ``other``, whichever requests these are. It is 0 if both keep up
    with the load, however long each request takes, and if one lets a few requests wait that the
    other does not. If it is larger in absolute value, the result is instead the share of requests
    that do not end in ``one``, minus the share that do not end in ``other``.
    """
    begin_s = _BEGINNING * max(one.arrivals_s, default=0.0)
    places = [place for place, at_s in enumerate(one.arrivals_s) if at_s > begin_s]
    own, others = (sorted(told.ends_s[place] for place in places) for told in (one, other))
    arrivals_s: list[float] = []
    later_s: list[float] = []
    num_lost = 0
    for place, own_s, other_s in zip(places, own, others, strict=True):
        num_lost += isinf(own_s) - isinf(other_s)
        if not isinf(own_s) and not isinf(other_s):
            arrivals_s.append(one.arrivals_s[place])
            later_s.append(own_s - other_s)
    lost = num_lost / len(places) if places else 0.0
    return max(_slope(arrivals_s, later_s), lost, key=abs)


def _slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the slope of the least-squares line through these points; 0 if all x are equal."""
    if not x:
        return 0.0
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((value - mean_x) ** 2 for value in x)
    if spread <= 0:
        return 0.0
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread
