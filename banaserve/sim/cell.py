"""Group of instances under one router and one migration policy, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from banaserve.costs.profile import Profile
from banaserve.costs.steps import StepCosts
from banaserve.errors import NoInstanceError
from banaserve.orchestrator import control
from banaserve.orchestrator.control import Mode
from banaserve.orchestrator.migration import registry as migrations
from banaserve.orchestrator.model.output_length import OutputLengthWindow
from banaserve.orchestrator.routing import registry as routings
from banaserve.sim.engine import SimEngine
from banaserve.sim.instance import SimInstance
from banaserve.sim.placing import Placing
from banaserve.sim.request import SimRequest
from banaserve.sim.store import HASH_BLOCK_TOKENS, SimPrefixCache
from banaserve.sim.system import System
from banaserve.sim.timeline import Timeline
from banaserve.types import (
    ClusterView,
    InstanceId,
    InstanceView,
    ObservedRequest,
    RequestId,
    RequestView,
    Role,
)

_REPEAT_S = 0.5
"""A request that no instance can take is tried again after this."""


class Cell:
    """Routes requests over its instances, hands KV over, and moves what its policy says.

    Attributes:
        load: Requests that are here and have not ended.
        finished: Requests that have ended, in that order.
        num_refused: Requests that fit no instance.
        num_restarted: Legs that ran again because an instance died.
        store: The global store's prefixes, where the system has one; shared by all cells.

    Args:
        turn: Its place among the cells.
        lighter: Called with ``turn`` when a request has ended.
    """

    def __init__(
        self,
        timeline: Timeline,
        profile: Profile,
        system: System,
        roles: Sequence[tuple[str, Role]],
        store: SimPrefixCache | None,
        turn: int,
        lighter: Callable[[int], None],
    ) -> None:
        self._timeline = timeline
        self._system = system
        self._turn, self._lighter = turn, lighter
        self._token_s = profile.shape.token_bytes / profile.link.bytes_per_s
        self._hop_s = profile.link.hop_s
        self._routing = routings.make_named(system.routing, start=turn, **system.routing_options)
        self._migration = migrations.make_named(system.migration, **system.migration_options)
        self._max_tokens = min(profile.model.max_context_tokens, profile.memory.kv_tokens)
        self._block_tokens = profile.memory.block_tokens
        self._memory = control.Remembered()
        self.store = store
        self.caches: dict[InstanceId, SimPrefixCache] = {}
        self.load = 0
        self.finished: list[SimRequest] = []
        self._seen: list[SimRequest] = []
        self._output_lengths = OutputLengthWindow()
        self.num_refused = 0
        self.num_restarted = 0
        self._num_returning = 0
        self.instances = {
            instance.id: instance
            for instance in (self._start(name, role, profile) for name, role in roles)
        }
        self._everyone = tuple(self.instances.values())
        self._views: dict[InstanceId, InstanceView] = {}
        self.placing = Placing(
            timeline, self.instances, profile, system.overlap_fraction, system.attention_fraction
        )

    def _start(self, name: str, role: Role, profile: Profile) -> SimInstance:
        engine = SimEngine(
            InstanceId(name),
            self._timeline,
            StepCosts(profile),
            self._system.limits,
            profile.memory.kv_tokens,
            self._fetch,
            self._prefilled,
            self._end,
        )
        if self._system.cache == "local":
            self.caches[InstanceId(name)] = SimPrefixCache(
                profile.memory.kv_tokens, HASH_BLOCK_TOKENS
            )
        prefill = profile.prefill
        tokens = self._system.limits.step_tokens
        step_s = prefill.fixed_s + tokens * prefill.token_s + tokens**2 * prefill.pair_s
        return SimInstance(engine, role, profile.facts, tokens / step_s, self._token_s)

    # ---- a request's way

    def submit(self, request: SimRequest) -> None:
        """A request arrives."""
        if request.prompt_tokens + request.output_tokens > self._max_tokens:
            self.num_refused += 1
            return
        self.load += 1
        if self._system.history_s:
            self._seen.append(request)
        self._send(request)

    def adopt(self, request: SimRequest, name: InstanceId, generated: int) -> None:
        """Take over a request that decodes at ``name`` and has ``generated`` tokens by now."""
        instance = self.instances[name]
        request.generated, request.to_compute = generated, 0
        request.first_s = self._timeline.now_s
        request.kv_tokens = request.all_tokens
        request.decode = instance
        self.load += 1
        instance.take(request, request.kv_tokens)
        instance.engine.submit(request)

    def expect(self, output_lengths: Iterable[int]) -> None:
        """Let routing know what requests have generated before this simulation."""
        for tokens in output_lengths:
            self._output_lengths.ended(tokens)

    def observed(self) -> tuple[ObservedRequest, ...]:
        """Returns the requests of the last while, as the router has seen them."""
        since_s = self._timeline.now_s - self._system.history_s
        self._seen = [one for one in self._seen if one.end_s < 0 or one.arrival_s >= since_s]
        return tuple(_observed(request) for request in self._seen)

    def view(self) -> ClusterView:
        """Returns the instances as router and policy see them at this moment."""
        now_s, views = self._timeline.now_s, self._views
        for instance in self._everyone:
            if instance.is_dirty or now_s > instance.view_old_s:
                views[instance.id] = instance.view(now_s)
        under_way = (*self.placing.under_way, *self.placing.waiting)
        lengths = self._output_lengths.lengths
        return ClusterView(now_s, views, under_way, output_lengths=lengths)

    def _send(self, request: SimRequest) -> None:
        """Route ``request`` with everything that it has so far, and give it to its first leg."""
        tokens = request.to_compute + request.cached_tokens
        cached = request.cached_tokens
        if self.store is not None and request.hash_ids and not cached:
            cached = min(self.store.lookup(request.hash_ids, request.prompt_tokens), tokens - 1)
        try:
            asked = RequestView(RequestId(str(request.id)), tokens, cached, request.max_tokens)
            route = self._routing.route(asked, self.view())
        except NoInstanceError:
            if not self.is_lost:
                self._timeline.after(_REPEAT_S, self._send, request)
            return
        request.decode = self.instances[route.decode]
        first = request.decode if route.prefill is None else self.instances[route.prefill]
        request.prefill = first
        if (cache := self.caches.get(first.id)) is not None and request.hash_ids:
            cached = min(cache.lookup(request.hash_ids, request.prompt_tokens), tokens - 1)
        request.cached_tokens = request.found_tokens = cached
        request.to_compute = tokens - cached
        first.take(request, tokens, request.to_compute)
        first.engine.submit(request)

    def _prefilled(self, engine: SimEngine, request: SimRequest) -> bool:
        """A prompt is computed: hand it over, unless it decodes where it is."""
        here = self.instances[engine.name]
        here.prefilled(request)
        if request.hash_ids:
            cache = self.caches.get(here.id) or self.store
            if cache is not None:
                cache.insert(request.hash_ids)
        if request.decode is here or request.generated >= request.output_tokens:
            return True
        here.leave(request)
        if self._system.handover == "store":
            engine.used_tokens -= request.kv_tokens
        else:
            request.held_by = engine
        target = request.decode
        if target.engine.is_dead:
            self._restart(request)
            return False
        target.take(request, request.kv_tokens)
        target.engine.submit(request)
        return False

    def _fetch(self, engine: SimEngine, request: SimRequest) -> None:
        """The engine has room: fetches queue up at its link."""
        if request.prefill is None:  # adopted: its KV is here already
            self._timeline.at(self._timeline.now_s, engine.join, request)
            return
        instance = self.instances[engine.name]
        start_s = max(self._timeline.now_s, instance.link_free_s)
        done_s = start_s + request.kv_tokens * self._token_s + 2 * self._hop_s
        instance.link_free_s = done_s
        self._timeline.at(done_s, self._fetched, request)

    def _fetched(self, request: SimRequest) -> None:
        source, request.held_by = request.held_by, None
        engine = request.decode.engine
        if source is not None and source.is_dead:
            engine.drop(request)
            request.decode.leave(request)
            self._restart(request)
            return
        if source is not None:
            source.release(request.kv_tokens)
        engine.join(request)

    def _end(self, engine: SimEngine, request: SimRequest) -> None:
        instance = self.instances[engine.name]
        instance.leave(request)
        self.load -= 1
        self._output_lengths.ended(request.output_tokens)
        self._lighter(self._turn)
        self.finished.append(request)

    # ---- control and faults

    @property
    def is_lost(self) -> bool:
        """Whether every instance is dead and none comes back: what is here never ends."""
        everyone = self.instances.values()
        return not self._num_returning and all(one.engine.is_dead for one in everyone)

    def control(self) -> None:
        """One turn of the control loop, the one that serves."""
        self.placing.bend()
        limits = self._system.control_limits
        view = replace(self.view(), requests=self.observed())
        turn = control.turn(view, self._migration, Mode.ON, False, limits, self._memory)
        self._memory = turn.after
        if turn.plan.is_ordered:
            self.placing.begin_in_order(turn.begin)
        else:
            for step in turn.begin:
                self.placing.begin(step)

    def kill(self, name: InstanceId, back_after_s: float | None) -> None:
        """The instance dies; its requests run again elsewhere."""
        dead = self.instances[name]
        lost = dead.engine.kill()
        self._num_returning += back_after_s is not None
        dead.inflight = dead.inflight_tokens = 0
        dead.forget_prompts()
        dead.is_dirty = True
        for step in self.placing.lose(dead):
            self._memory = self._memory.with_failed(step.action, self._timeline.now_s)
        for request in lost:
            request.uncounted_tokens = 0
            self._restart(request)
        if back_after_s is not None:
            self._timeline.after(back_after_s, self._revive, dead)

    def _revive(self, dead: SimInstance) -> None:
        self._num_returning -= 1
        dead.engine.is_dead = False
        dead.changed_s = self._timeline.now_s
        dead.is_dirty = True

    def _restart(self, request: SimRequest) -> None:
        """Run what is left again; the store still has whole blocks, another system has nothing."""
        self.num_restarted += 1
        if request.held_by is not None and not request.held_by.is_dead:
            request.held_by.release(request.kv_tokens)
        request.held_by = None
        request.start_over()
        if self._system.handover == "store" and request.generated:
            whole = (request.all_tokens - 1) // self._block_tokens * self._block_tokens
            request.cached_tokens, request.to_compute = whole, request.all_tokens - whole
        self._send(request)


def _observed(request: SimRequest) -> ObservedRequest:
    has_ended = request.end_s >= 0
    at = request.prefill if request.first_s < 0 else request.decode
    generated = request.generated
    if at is not None and not has_ended:
        generated = at.engine.generated_by(request)
    return ObservedRequest(
        request.arrival_s,
        request.prompt_tokens,
        request.found_tokens,
        generated,
        None if has_ended or at is None else at.id,
        request.first_s if request.first_s >= 0 else None,
        request.end_s if has_ended else None,
    )
