"""Load-aware routing: BanaServe Algorithm 2, as published and repaired.

With a global KV cache store, every instance can read every prefix, so the choice depends on load
only. Symbols of the paper: Q the requests, P the prefill instances, load[p] their load U (Eq. 37),
q_len[p] their queue length, delta_L the load threshold.

Faults and repairs:
  - Line 9 sorts once while line 15 changes the loads, so line 12 selects the same instance until it
    exceeds delta_L. Here a heap selects the least loaded instance for each request.
  - q_len is never updated, so above delta_L the rest of the batch joins one queue. Here it grows
    with each assignment; then the order (load, queue length) needs no threshold.
  - Load is compute plus memory, but the KV of a prefill instance leaves at once, and the measured
    load and EstimateLoad have no common unit. Here both are seconds of work on missed tokens.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from banaserve.base.errors import UserError
from banaserve.base.types import InstanceId, InstanceView, RequestId, RequestView
from banaserve.orchestrator.control.measure import STALE_AFTER_S
from banaserve.orchestrator.control.routing.leg_by_leg import LegByLeg
from banaserve.orchestrator.control.routing.legs import LegOptions
from banaserve.orchestrator.control.routing.load import (
    FULL_LOAD_S,
    MAX_RUNNING_REQUESTS,
    LoadModel,
    published_load,
)
from banaserve.orchestrator.control.routing.option_checks import check_number
from banaserve.orchestrator.control.routing.registry import register

PUBLISHED = "published"
REPAIRED = "repaired"

PUBLISHED_DELTA_L = 1.3
"""Default of delta_L, which the paper does not give: the paper's only load of a busy prefill
instance, 95% compute and 35% memory (Fig. 2b), added as in Eq. 37."""


@dataclass(frozen=True, slots=True)
class LoadAwareOptions:
    """Options of ``load_aware``.

    Attributes:
        preset: Form of the algorithm: ``repaired``, or ``published`` for Algorithm 2 literally.
        delta_l: Load threshold of ``published``, in (0, 2]; ``repaired`` has none.
        stale_after_s: Age of a report, in seconds, above which it is ignored.
        max_running_requests: Number of places in an instance's batch, vLLM's ``max_num_seqs``.
        full_load_s: Prefill work that counts as a load of 1, in seconds.
    """

    preset: str = REPAIRED
    delta_l: float | None = None
    stale_after_s: float = STALE_AFTER_S
    max_running_requests: int = MAX_RUNNING_REQUESTS
    full_load_s: float = FULL_LOAD_S

    def __post_init__(self) -> None:
        if self.preset not in (PUBLISHED, REPAIRED):
            raise UserError(f"preset {self.preset!r}: give {PUBLISHED} or {REPAIRED}")
        if self.delta_l is not None and self.preset != PUBLISHED:
            raise UserError(f"delta_l belongs to the preset {PUBLISHED}: leave it out")
        if self.delta_l is not None:
            check_number("delta_l", self.delta_l, at_most=2)
        for name in ("stale_after_s", "max_running_requests", "full_load_s"):
            check_number(name, getattr(self, name))

    def model(self, views: Sequence[InstanceView], now_s: float) -> LoadModel:
        """Return the load estimates of ``views`` with these options."""
        return LoadModel.of(
            views,
            now_s,
            stale_after_s=self.stale_after_s,
            max_running_requests=self.max_running_requests,
            full_load_s=self.full_load_s,
        )


class Assignment(NamedTuple):
    """A request and the instance that computes its prompt."""

    request: RequestId
    instance: InstanceId


def dispatch(
    requests: Sequence[RequestView],
    views: Sequence[InstanceView],
    now_s: float,
    options: LoadAwareOptions,
) -> list[Assignment]:
    """Assign a batch of requests to instances: BanaServe Alg. 2 in the preset of ``options``.

    Pure. Among equals, the earlier of ``views`` is taken; ``views`` must not be empty.
    """
    place = _dispatch_published if options.preset == PUBLISHED else _dispatch_repaired
    return place(requests, views, options.model(views, now_s), options)


def _dispatch_published(
    requests: Sequence[RequestView],
    views: Sequence[InstanceView],
    model: LoadModel,
    options: LoadAwareOptions,
) -> list[Assignment]:
    """Return the assignments of BanaServe Alg. 2, lines 3 to 23, with its defects.

    Select(least-loaded) is the head of the list sorted once: the stated cost O(|P| log |P| + |Q|)
    does not allow a search. EstimateLoad, which the paper does not define, is the time of the whole
    prompt as a share of ``full_load_s``. An instance without a fresh report cannot be measured; it
    is a candidate only if no instance can be, with load 0 and the router's own count as its queue.
    """
    delta_l = PUBLISHED_DELTA_L if options.delta_l is None else options.delta_l
    measured = [(view, report) for view in views if (report := model.report(view)) is not None]
    if measured:
        load = {view.id: published_load(report) for view, report in measured}
        q_len = {view.id: report.num_waiting for view, report in measured}
    else:
        load = dict.fromkeys((view.id for view in views), 0.0)
        q_len = {view.id: view.inflight_requests for view in views}
    by_id = {view.id: view for view in views}
    candidates = sorted(load, key=lambda p: (load[p], q_len[p]))
    assignments = []
    for request in requests:
        target = candidates[0]
        if load[target] < delta_l:
            prefill_s = request.prompt_tokens / model.tokens_per_s(by_id[target])
            load[target] += prefill_s / options.full_load_s
        else:
            target = min(candidates, key=lambda p: q_len[p])
        assignments.append(Assignment(request.id, target))
    return assignments


def _dispatch_repaired(
    requests: Sequence[RequestView],
    views: Sequence[InstanceView],
    model: LoadModel,
    options: LoadAwareOptions,
) -> list[Assignment]:
    """Return the assignments of BanaServe Alg. 2, repaired.

    A heap holds (load, queue length, outstanding prefill tokens), which all grow with each
    assignment: O((|P| + |Q|) log |P|). A waiting request of another front door counts with the mean
    tokens of the batch.
    """
    if not requests:
        return []
    mean_tokens = sum(request.uncached_tokens for request in requests) / len(requests)
    heap = [_prefill_rank(place, view, model, mean_tokens) for place, view in enumerate(views)]
    heapq.heapify(heap)
    assignments = []
    for request in requests:
        ahead_s, queue, tokens, is_stale, place = heap[0]
        view, missed = views[place], request.uncached_tokens
        assignments.append(Assignment(request.id, view.id))
        ahead_s += missed / model.tokens_per_s(view)
        heapq.heapreplace(heap, (ahead_s, queue + 1, tokens + missed, is_stale, place))
    return assignments


def _prefill_rank(
    place: int, view: InstanceView, model: LoadModel, mean_tokens: float
) -> tuple[float, int, int, bool, int]:
    """Return seconds ahead, queue, outstanding tokens, whether the report is stale, and place."""
    queue = model.queue_requests(view)
    tokens = view.inflight_prefill_tokens
    ahead_tokens = tokens + (queue - view.inflight_requests) * mean_tokens
    ahead_s = ahead_tokens / model.tokens_per_s(view) if ahead_tokens else 0.0
    return ahead_s, queue, tokens, model.report(view) is None, place


def least_loaded(views: Sequence[InstanceView], model: LoadModel) -> InstanceView:
    """Return the instance with the most room to decode; among equals, the earlier of ``views``."""
    return min(views, key=model.decode_rank)


@register("load_aware")
class LoadAware(LegByLeg):
    """Policy that sends each request to the instance with the least work ahead.

    It is BanaServe Alg. 2 with batches of one request. The router's counts rise with each request
    that it sends, so that the repaired form sees its last assignments; the published form sees
    reports only. The paper does not specify the decode leg: both presets take the instance of least
    ``decode_load``. If one instance serves both legs, the published form applies Alg. 2 to it, too.
    """

    Options: ClassVar = LoadAwareOptions

    def __init__(self, options: LoadAwareOptions, legs: LegOptions, start: int = 0) -> None:
        super().__init__(legs, start)
        self._options = options

    def choose_prefill(
        self, request: RequestView, views: Sequence[InstanceView], now_s: float
    ) -> InstanceView:
        [assignment] = dispatch([request], views, now_s, self._options)
        return next(view for view in views if view.id == assignment.instance)

    def choose_decode(self, views: Sequence[InstanceView], now_s: float) -> InstanceView:
        return least_loaded(views, self._options.model(views, now_s))

    def as_good_prefill(
        self,
        request: RequestView,
        chosen: InstanceView,
        views: Sequence[InstanceView],
        now_s: float,
    ) -> Sequence[InstanceView]:
        """Return the instances with exactly as much work ahead; only ``chosen`` if published."""
        if self._options.preset == PUBLISHED:
            return (chosen,)
        model, tokens = self._options.model(views, now_s), request.uncached_tokens
        least = _prefill_rank(0, chosen, model, tokens)
        equals = (one for one in views if _prefill_rank(0, one, model, tokens) == least)
        return (chosen, *(one for one in equals if one.role is chosen.role and one is not chosen))

    def as_good_decode(
        self, chosen: InstanceView, views: Sequence[InstanceView], now_s: float
    ) -> Sequence[InstanceView]:
        """Return the instances that are no fuller now than ``chosen`` would be with this request.

        So an instance's load exceeds the least one by at most the share of one request.
        """
        model = self._options.model(views, now_s)
        most = model.decode_load(chosen) + model.request_share(chosen)
        others = (one for one in views if one is not chosen and model.decode_load(one) <= most)
        return (chosen, *others)

    def choose_both(
        self, request: RequestView, views: Sequence[InstanceView], now_s: float
    ) -> InstanceView:
        if self._options.preset == PUBLISHED:
            return self.choose_prefill(request, views, now_s)
        return self.choose_decode(views, now_s)
