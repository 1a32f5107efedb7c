"""Requests of a simulated engine: queue, batch and KV memory, without any notion of time.

KV is counted in tokens; a partial block counts as its tokens. A prompt gets room for all of its
tokens when it is admitted, so that it never waits half computed.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from banaserve.base.errors import UserError
from banaserve.orchestrator.control.model.learnt_time import StepWork
from banaserve.orchestrator.control.rebalancing import Stream
from banaserve.sim.request import SimRequest


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits like vLLM's ``max_num_batched_tokens`` and ``max_num_seqs``, and the KV kept free.

    Attributes:
        watermark_fraction: Fraction of the KV cache into which no new request is admitted, so that
            decoding requests can grow.
        plans_ahead: True if a step is planned when the one before it begins, as with vLLM's
            ``async_scheduling``; a request then waits for one step more.
    """

    step_tokens: int = 2048
    max_requests: int = 256
    watermark_fraction: float = 0.01
    plans_ahead: bool = False

    def __post_init__(self) -> None:
        for name in ("step_tokens", "max_requests"):
            if not isinstance(value := getattr(self, name), int) or value < 1:
                raise UserError(f"{name} is {value!r}: give a whole number above 0")


class SimBatch:
    """State of a scheduler like vLLM's: first come, first served, preempting the last that came.

    Args:
        fetch: Called with a request whose KV is elsewhere, once there is room for that KV. Returns
            the number of tokens that the request's first step fetches, or None if
            ``SimEngine.join`` is called once the KV has arrived.
    """

    def __init__(
        self, limits: EngineLimits, kv_tokens: int, fetch: Callable[[SimRequest], int | None]
    ) -> None:
        self.limits = limits
        self.kv_tokens = kv_tokens
        self.used_tokens = 0
        self.waiting: deque[SimRequest] = deque()
        self.prefilling: list[SimRequest] = []
        self.decoding: dict[int, SimRequest] = {}
        self.loading: dict[int, SimRequest] = {}
        self.num_preemptions = 0
        self._fetch = fetch
        self._context = 0
        # Contexts of decoding requests, ascending, less the steps done: all grow alike.
        self._lengths: list[int] = []
        self._steps_done = 0
        self._ends: list[tuple[int, int, SimRequest]] = []
        self._chunks: list[tuple[SimRequest, int]] = []
        self._joining: list[SimRequest] = []
        self._leaving: list[SimRequest] = []
        self._has_lost_kv = False
        self._fetched_tokens = 0

    @property
    def num_running(self) -> int:
        decoding, prefilling = len(self.decoding), len(self.prefilling)
        return decoding + prefilling + len(self.loading) + len(self._joining)

    @property
    def num_streams(self) -> int:
        """Return the number of requests whose prompts are computed, here or elsewhere."""
        num_prompts = len(self.prefilling) + sum(not one.generated for one in self.waiting)
        return self.num_running + len(self.waiting) - num_prompts

    def streams(self) -> list[Stream]:
        """Return the requests whose KV is in the store, the oldest first."""
        running = [
            Stream(one, one.prompt_tokens + self.generated_by(one), False, one.rebalanced_s)
            for one in self.decoding.values()
        ]
        waiting = [
            Stream(one, one.all_tokens, True, one.rebalanced_s)
            for one in self.waiting
            if one.generated
        ]
        return [*running, *waiting]

    @property
    def work(self) -> StepWork:
        """Return the work of a step with the present requests."""
        tokens = computed = 0
        for request in self.prefilling:
            tokens += request.to_compute
            computed = max(computed, request.computed)
        tokens = min(tokens, max(0, self.limits.step_tokens - len(self.decoding)))
        pairs = tokens * (tokens + 2 * computed)
        return StepWork(tokens, pairs, len(self.decoding), self._context)

    @property
    def is_short_of_kv(self) -> bool:
        """Return whether the next request waits for KV room, and for nothing else."""
        if not self.waiting or self.num_running >= self.limits.max_requests:
            return False
        return not self._has_room(self.waiting[0])

    def _free(self) -> int:
        return self.kv_tokens - self.used_tokens

    def _to_next_end(self) -> int:
        ends = self._ends
        while ends[0][2].end_step != ends[0][0] or ends[0][2].id not in self.decoding:
            heapq.heappop(ends)
        return ends[0][0] - self._steps_done

    def _has_room(self, request: SimRequest) -> bool:
        """Return whether ``request`` may be admitted: there is room for all that it needs."""
        # ``num_running`` and ``needed_tokens`` are inlined: this runs at every step and arrival.
        running = len(self.decoding) + len(self.prefilling) + len(self.loading)
        running += len(self._joining)
        if running >= self.limits.max_requests:
            return False
        computed = request.to_compute
        needed = computed + request.cached_tokens if computed else request.kv_tokens
        if running:
            needed += int(self.kv_tokens * self.limits.watermark_fraction)
        return needed <= self.kv_tokens - self.used_tokens

    def _admit(self) -> None:
        """Admit waiting requests that fit, first come, first served."""
        while self.waiting and self._has_room(self.waiting[0]):
            request = self.waiting.popleft()
            self.used_tokens += request.needed_tokens
            if request.to_compute:
                self._fetched_tokens += request.cached_tokens - request.resident_tokens
                request.computed, request.cached_tokens = request.cached_tokens, 0
                self.prefilling.append(request)
            else:
                self.loading[request.id] = request
                if (fetched_tokens := self._fetch(request)) is not None:
                    self._join(request, fetched_tokens)

    def _join(self, request: SimRequest, fetched_tokens: int) -> None:
        """Let an admitted ``request`` decode from the next step on, which fetches its KV."""
        del self.loading[request.id]
        self._fetched_tokens += fetched_tokens
        self._joining.append(request)

    def _take_fetched(self) -> int:
        """Return and reset the tokens to fetch for requests admitted since the last step."""
        tokens, self._fetched_tokens = self._fetched_tokens, 0
        return tokens

    def _plan_chunks(self) -> tuple[int, int]:
        """Share the tokens of a step among the prompts under way; return tokens and pairs."""
        left = self.limits.step_tokens - len(self.decoding)
        total = pairs = 0
        for request in self.prefilling:
            if left <= 0:
                break
            tokens = min(left, request.to_compute)
            self._chunks.append((request, tokens))
            pairs += tokens * (tokens + 2 * request.computed)
            total += tokens
            left -= tokens
        return total, pairs

    def _enter(self, request: SimRequest) -> None:
        """Let ``request`` decode from the next step on; called between two steps."""
        request.joined_step = self._steps_done
        request.end_step = self._steps_done + request.output_tokens - request.generated
        self.decoding[request.id] = request
        self._context += request.kv_tokens
        insort(self._lengths, request.kv_tokens - self._steps_done)
        heapq.heappush(self._ends, (request.end_step, request.id, request))

    def _settle(self, request: SimRequest) -> None:
        """Bring the counts of a decoding request up to the last step."""
        steps = self._steps_done - request.joined_step
        request.generated += steps
        request.kv_tokens += steps
        request.joined_step = self._steps_done

    def contexts(self) -> tuple[int, int, int]:
        """Return the least and the largest context of the decoding requests, and the sum of all."""
        done = self._steps_done
        return self._lengths[0] + done, self._lengths[-1] + done, self._context

    def generated_by(self, request: SimRequest) -> int:
        """Return the tokens that ``request`` has generated up to the last finished step."""
        if self.decoding.get(request.id) is not request:
            return request.generated
        return request.generated + self._steps_done - request.joined_step

    def _leave(self, request: SimRequest) -> None:
        del self.decoding[request.id]
        self._context -= request.kv_tokens
        del self._lengths[bisect_left(self._lengths, request.kv_tokens - self._steps_done)]
        self.used_tokens -= request.kv_tokens

    def _take_leaving(self) -> list[SimRequest]:
        """Remove and return the requests that decode elsewhere from now on; between two steps."""
        leaving, self._leaving = self._leaving, []
        here = [request for request in leaving if self.decoding.get(request.id) is request]
        for request in here:
            self._settle(request)
            self._leave(request)
        return here

    def _preempt(self, request: SimRequest) -> None:
        self._settle(request)
        self._leave(request)
        request.start_over()
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(request)

    def _preempt_to_fit(self) -> None:
        """Preempt until every decoding request has room for a token; the last that came first."""
        if self._has_lost_kv:
            self._has_lost_kv = False
            for request in [*self.decoding.values()][::-1]:
                self._preempt(request)
            for request in self.prefilling[::-1]:
                self.used_tokens -= request.computed + request.to_compute
                request.start_over()
                self.waiting.appendleft(request)
            self.prefilling.clear()
        while self.decoding and len(self.decoding) > self._free():
            self._preempt(self.decoding[next(reversed(self.decoding))])

    def _take_step(self, steps: int) -> list[SimRequest]:
        """Give every decoding request ``steps`` tokens; remove and return those that are done."""
        batch = len(self.decoding)
        self._steps_done += steps
        self._context += batch * steps
        self.used_tokens += batch * steps
        done = []
        while self._ends and self._ends[0][0] <= self._steps_done:
            end_step, _, request = heapq.heappop(self._ends)
            if request.end_step == end_step and self.decoding.get(request.id) is request:
                self._settle(request)
                self._leave(request)
                done.append(request)
        return done

    def _take_all(self) -> list[SimRequest]:
        """Empty the batch; return the requests that were in it, oldest first."""
        lost = [*self.waiting, *self.prefilling, *self.loading.values(), *self._joining]
        for request in self.decoding.values():
            self._settle(request)
            lost.append(request)
        for table in (self.waiting, self.prefilling, self.loading, self.decoding):
            table.clear()
        for entries in (self._ends, self._joining, self._leaving, self._chunks, self._lengths):
            entries.clear()
        self.used_tokens = self._context = self._fetched_tokens = 0
        return sorted(lost, key=lambda request: request.id)
