"""Simulated engine: iteration-level batching, chunked prefill, KV memory and preemption.

The engine steps as vLLM does: each step takes a chunk of the prompts under way and one token of
every decoding request. Steps that only decode are taken together, at the cost of one event, until a
request ends, the memory is full or a request arrives: their times sum up in closed form.
"""

from __future__ import annotations

from collections.abc import Callable

from banaserve.base.types import InstanceId
from banaserve.orchestrator.control.costs.steps import StepCosts, run_s, steps_within
from banaserve.orchestrator.control.costs.transfers import overlapped_s
from banaserve.sim.instances.batch import EngineLimits, SimBatch
from banaserve.sim.request import SimRequest
from banaserve.sim.timeline import Timeline


class SimEngine(SimBatch):
    """Simulated engine. Roles are the router's knowledge: any engine serves any leg.

    Args:
        fetch: Called with a request whose KV is elsewhere, as by ``SimBatch``.
        prefilled: Called when a prompt is computed; returns True if this engine decodes it, too.
        finished: Called when a request has its last token.
        left: Called with a request that leaves for another engine, as ``move_away`` has asked.

    Attributes:
        observe: Called at the end of each step, or of each run of steps that only decode, with its
            start, its duration, and the number of steps, decoding requests and prompt tokens; None
            for no observer.
    """

    def __init__(
        self,
        name: InstanceId,
        timeline: Timeline,
        costs: StepCosts,
        limits: EngineLimits,
        kv_tokens: int,
        fetch: Callable[[SimEngine, SimRequest], int | None],
        prefilled: Callable[[SimEngine, SimRequest], bool],
        finished: Callable[[SimEngine, SimRequest], None],
        left: Callable[[SimEngine, SimRequest], None],
    ) -> None:
        super().__init__(limits, kv_tokens, lambda request: fetch(self, request))
        self.name = name
        self.costs = costs
        self.is_dead = False
        self.observe: Callable[[float, float, int, int, int], None] | None = None
        self.num_steps = 0
        self.prefilled_tokens = 0
        self.prefill_busy_s = 0.0
        self._timeline = timeline
        self._prefilled, self._finished, self._left = prefilled, finished, left
        self._version = 0
        self._is_stepping = False
        self._stall_s = 0.0
        self._run = (0.0, 0.0, 0.0, 0.0, 0)
        self._busy_s = self._work_s = 0.0

    # ---- from outside

    def submit(self, request: SimRequest) -> None:
        """Take a request, with ``to_compute`` tokens to prefill or with KV to fetch."""
        self.waiting.append(request)
        self._wake()

    def join(self, request: SimRequest, fetched_tokens: int = 0) -> None:
        """Let ``request``, whose KV has arrived, decode from the next step on.

        Args:
            fetched_tokens: Number of tokens whose KV that step fetches from the store.
        """
        if request.id in self.loading:
            self._join(request, fetched_tokens)
            self._wake()

    def release(self, tokens: int) -> None:
        """Free KV that was kept for another engine."""
        self.used_tokens -= tokens
        self._wake()

    def resize(self, kv_tokens: int) -> None:
        """Resize the KV cache; requests that no longer fit are preempted at the next step."""
        self.kv_tokens = kv_tokens
        self._wake()

    def stall(self, seconds: float) -> None:
        """Stop for ``seconds`` at the next boundary between two steps."""
        self._stall_s += seconds

    def kill(self) -> list[SimRequest]:
        """Die; return the requests that were here, oldest first, with the tokens they got."""
        start_s, first_s, growth_s, _, steps = self._run
        elapsed_s = self._timeline.now_s - start_s
        if self._is_stepping and not self._chunks and elapsed_s > 0:
            whole = min(steps, steps_within(first_s, growth_s, elapsed_s)) - 1
            self._take_step(whole)
        self.is_dead = True
        self._is_stepping = False
        self._version += 1
        return self._take_all()

    def move_away(self, request: SimRequest) -> None:
        """Let ``request`` leave: at once if it waits, or else after the step under way."""
        if self.decoding.get(request.id) is request:
            self._leaving.append(request)
            self._wake()
        elif request in self.waiting:
            self.waiting.remove(request)
            self._left(self, request)

    def drop(self, request: SimRequest) -> None:
        """Forget ``request`` and free its room, since the KV that it was to fetch is gone."""
        if self.loading.pop(request.id, None) is not None:
            self.release(request.kv_tokens)

    @property
    def step_s(self) -> float:
        """Return the duration of the step under way, or of the last step, in seconds."""
        return self._run[1]

    def lose_kv(self) -> None:
        """Lose every request's KV with a lost guest: after this step all is computed again."""
        self._has_lost_kv = True
        self._wake()

    def busy(self) -> tuple[float, float]:
        """Return the seconds spent in steps so far, and the part that grew with the work."""
        busy_s, work_s = self._busy_s, self._work_s
        if self._is_stepping:
            start_s, first_s, _, first_work_s, _ = self._run
            elapsed_s = max(0.0, self._timeline.now_s - start_s)
            busy_s += elapsed_s
            work_s += elapsed_s * first_work_s / first_s
        return busy_s, work_s

    # ---- steps

    def _wake(self) -> None:
        if self.is_dead:
            return
        if not self._is_stepping:
            self._step()
        elif not self._chunks and self._has_news():
            self._cut(self._timeline.now_s)

    def _has_news(self) -> bool:
        """Return whether the next step could differ from this one."""
        if self._joining or self._leaving or self._has_lost_kv:
            return True
        if len(self.decoding) > self.kv_tokens - self.used_tokens:
            return True
        return bool(self.waiting) and self._has_room(self.waiting[0])

    def _step(self) -> None:
        """Begin the next step, or the next run of steps that only decode."""
        self._is_stepping = False
        if self._leaving:
            for request in self._take_leaving():
                self._left(self, request)
        if self._joining:
            self._enter_joining()
        batch = len(self.decoding)
        may_admit = True
        if self._has_lost_kv or batch > self.kv_tokens - self.used_tokens:
            self._preempt_to_fit()
            batch = len(self.decoding)
            # A preempted request would be admitted again at once, and be preempted again.
            may_admit = not batch and not self.prefilling
        is_planned = self.limits.plans_ahead and bool(batch or self.prefilling)
        if self.waiting and may_admit and not is_planned:
            self._admit()
            if self._joining:
                self._enter_joining()
            batch = len(self.decoding)
        tokens, pairs = self._plan_chunks() if self.prefilling else (0, 0)
        if not tokens and not batch:
            return
        now_s = self._timeline.now_s + self._stall_s
        self._stall_s = 0.0
        is_single = bool(tokens or self._fetched_tokens)
        if is_single:
            first_s, work_s = self.costs.mixed_s(tokens, pairs, batch, self._context)
            if fetched := self._take_fetched():
                fetch_s = fetched * self.costs.fetch_token_s
                first_s = overlapped_s(fetch_s, first_s, 0.0, self.costs.num_layers)
            growth_s, steps = 0.0, 1
        else:
            first_s, growth_s, work_s = self.costs.decode_run(batch, self._context)
        if self.waiting and may_admit and is_planned:
            self._admit()
        if not is_single:
            room = (self.kv_tokens - self.used_tokens) // batch
            is_alone = not (self.prefilling or self._joining)
            steps = min(self._to_next_end(), room if room > 1 and is_alone else 1)
        self._is_stepping = True
        self._version += 1
        self._run = (now_s, first_s, growth_s, work_s, steps)
        self._timeline.at(now_s + run_s(first_s, growth_s, steps), self._end, self._version)

    def _enter_joining(self) -> None:
        for request in self._joining:
            self._enter(request)
        self._joining.clear()

    def _cut(self, now_s: float) -> None:
        """Shorten a run of steps, to end with the step under way."""
        start_s, first_s, growth_s, work_s, steps = self._run
        if not self._is_stepping or self._chunks or steps == 1:
            return
        begun = min(steps, steps_within(first_s, growth_s, max(0.0, now_s - start_s)))
        if begun < steps:
            self._version += 1
            self._run = (start_s, first_s, growth_s, work_s, begun)
            self._timeline.at(start_s + run_s(first_s, growth_s, begun), self._end, self._version)

    def _end(self, version: int) -> None:
        """End a step, or a run of steps."""
        if version != self._version:
            return
        start_s, first_s, growth_s, work_s, steps = self._run
        took_s = run_s(first_s, growth_s, steps)
        if self.observe is not None:
            tokens = sum([chunk for _, chunk in self._chunks])
            self.observe(start_s, took_s, steps, len(self.decoding), tokens)
        self._busy_s += took_s
        self._work_s += work_s * steps + growth_s * steps * (steps - 1) / 2
        self.num_steps += steps
        if self.decoding:
            for request in self._take_step(steps):
                self._finish(request)
        if self._chunks:
            self._end_chunks(took_s)
        self._step()

    def _end_chunks(self, took_s: float) -> None:
        chunks, self._chunks = self._chunks, []
        self.prefill_busy_s += took_s
        for request, tokens in chunks:
            self.prefilled_tokens += tokens
            request.computed += tokens
            request.to_compute -= tokens
            if request.to_compute == 0:
                self.prefilling.remove(request)
                self._end_prefill(request)

    def _end_prefill(self, request: SimRequest) -> None:
        """End the prefill of ``request``, whose last step has sampled a token."""
        request.kv_tokens = request.computed
        request.generated += 1
        if request.first_s < 0:
            request.first_s = self._timeline.now_s
        stays = self._prefilled(self, request)
        if request.generated >= request.output_tokens:
            self.used_tokens -= request.kv_tokens
            self._finish(request)
        elif stays:
            self._enter(request)

    def _finish(self, request: SimRequest) -> None:
        request.end_s = self._timeline.now_s
        self._finished(self, request)
