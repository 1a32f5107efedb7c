"""Group of instances under one router and one migration policy, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from banaserve.base.errors import NoInstanceError
from banaserve.base.types import (
    ClusterView,
    Distance,
    InstanceId,
    InstanceView,
    ObservedRequest,
    RequestId,
    RequestView,
    Role,
    Route,
)
from banaserve.orchestrator.control.costs.devices import device_of, relative_speed
from banaserve.orchestrator.control.costs.profile import Profile
from banaserve.orchestrator.control.costs.steps import StepCosts
from banaserve.orchestrator.control.model.output_length import OutputLengthWindow
from banaserve.orchestrator.control.move_policies import registry as migrations
from banaserve.orchestrator.control.rebalancing import (
    RebalanceOptions,
    choose_moves,
    decode_load_of,
    remaining_tokens,
)
from banaserve.orchestrator.control.routing import registry as routings
from banaserve.orchestrator.control.turn import Mode, Remembered, Turn
from banaserve.orchestrator.control.turn import turn as take_turn
from banaserve.sim.cluster.placing import Placing
from banaserve.sim.instances.engine import SimEngine
from banaserve.sim.instances.instance import SimInstance
from banaserve.sim.instances.prefix_cache import SimPrefixCache
from banaserve.sim.request import SimRequest
from banaserve.sim.system import System
from banaserve.sim.timeline import Timeline

_REPEAT_S = 0.5
"""Time after which a request that no instance could take is tried again, in seconds."""

Far = Mapping[InstanceId, Mapping[InstanceId, Distance | None]]
"""Network paths of each instance to those on other machines, as in ``InstanceView.far``."""


class Cell:
    """Group of instances that routes requests, hands KV over, and moves modules by its policy.

    Attributes:
        load: Number of requests in the cell that have not ended.
        finished: Requests that have ended, in the order of their ends.
        num_refused: Number of requests that fit no instance.
        num_restarted: Number of legs that ran again because an instance died.
        num_rebalanced: Number of streams that left an overloaded instance.
        num_handed_over: Number of prompts fetched by the instance that decodes; ``num_handed_far``
            counts those of them that came from another machine.
        store: Prefixes in the global store, shared by all cells; None if the system has no such
            store.
        on_turn: Called with each turn of the control loop before its steps begin.

    Args:
        turn: Index of the cell among the cells.
        lighter: Called with ``turn`` when a request has ended.
        far: Network paths between instances on different machines; None if all share one machine.
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
        *,
        far: Far | None = None,
    ) -> None:
        self._timeline = timeline
        self._system = system
        self._turn, self._lighter = turn, lighter
        self._token_bytes = profile.model.token_bytes
        self._token_s = self._token_bytes / profile.link.bytes_per_s
        self._hop_s = profile.link.hop_s
        self._routing = routings.make_named(system.routing, start=turn, **system.routing_options)
        self._migration = migrations.make_named(system.migration, **system.migration_options)
        own = {name: self._profile_of(name, profile) for name, _ in roles}
        kv_tokens = min(one.memory.kv_tokens for one in own.values())
        self._max_tokens = min(profile.model.max_context_tokens, kv_tokens)
        self._block_tokens = profile.memory.block_tokens
        self._memory = Remembered()
        self.store = store
        self.caches: dict[InstanceId, SimPrefixCache] = {}
        self.load = 0
        self.finished: list[SimRequest] = []
        self._seen: list[SimRequest] = []
        self._output_lengths = OutputLengthWindow()
        self.num_refused = 0
        self.num_restarted = 0
        self.num_rebalanced = 0
        self._rebalancing: set[InstanceId] = set()
        self.num_handed_over = self.num_handed_far = 0
        self._num_returning = 0
        self.instances = {
            instance.id: instance
            for instance in (self._start(name, role, own[name], profile) for name, role in roles)
        }
        for name, ways in (far or {}).items():
            self.instances[name].far = ways
        self._everyone = tuple(self.instances.values())
        self._views: dict[InstanceId, InstanceView] = {}
        self.on_turn: list[Callable[[Turn], None]] = []
        self.placing = Placing(
            timeline, self.instances, profile, system.overlap_fraction, system.attention_fraction
        )

    def _profile_of(self, name: str, usual: Profile) -> Profile:
        given = self._system.devices.get(name)
        return usual if given is None else device_of(given, usual)

    def _start(self, name: str, role: Role, profile: Profile, usual: Profile) -> SimInstance:
        engine = SimEngine(
            InstanceId(name),
            self._timeline,
            StepCosts(profile),
            self._system.limits,
            profile.memory.kv_tokens,
            self._fetch,
            self._prefilled,
            self._end,
            self._left,
        )
        if self._system.cache == "local":
            self.caches[InstanceId(name)] = SimPrefixCache(profile.memory.kv_tokens)
        prefill = profile.prefill
        tokens = self._system.limits.step_tokens
        step_s = prefill.fixed_s + tokens * prefill.token_s + tokens**2 * prefill.pair_s
        facts = profile.facts
        if profile is not usual:
            facts = replace(
                facts, profile=self._system.devices[name], speed=relative_speed(profile, usual)
            )
        return SimInstance(engine, role, facts, tokens / step_s, self._token_s)

    # ---- the life of a request

    def submit(self, request: SimRequest) -> None:
        """Take and route an arriving request."""
        if request.prompt_tokens + request.output_tokens > self._max_tokens:
            self.num_refused += 1
            return
        self.load += 1
        if self._system.history_s:
            self._seen.append(request)
        self._send(request)

    def adopt(self, request: SimRequest, name: InstanceId, generated: int) -> None:
        """Take over a request that decodes at ``name`` and has generated ``generated`` tokens."""
        instance = self.instances[name]
        request.generated, request.to_compute = generated, 0
        request.first_s = self._timeline.now_s
        request.kv_tokens = request.all_tokens
        request.decode = instance
        self.load += 1
        instance.take(request, request.kv_tokens)
        instance.engine.submit(request)

    def expect(self, output_lengths: Iterable[int]) -> None:
        """Tell the routing how many tokens each request generated before this simulation."""
        for tokens in output_lengths:
            self._output_lengths.ended(tokens)

    def observed(self) -> tuple[ObservedRequest, ...]:
        """Return the requests of the last ``history_s`` seconds, as the router has seen them."""
        since_s = self._timeline.now_s - self._system.history_s
        self._seen = [one for one in self._seen if one.end_s < 0 or one.arrival_s >= since_s]
        return tuple(_observed(request) for request in self._seen)

    def view(self) -> ClusterView:
        """Return the instances as router and policy see them at this moment."""
        now_s, views = self._timeline.now_s, self._views
        for instance in self._everyone:
            if instance.is_dirty or now_s > instance.view_old_s:
                views[instance.id] = instance.view(now_s)
        under_way = (*self.placing.under_way, *self.placing.waiting)
        lengths = self._output_lengths.lengths
        return ClusterView(now_s, views, under_way, output_lengths=lengths)

    def _send(self, request: SimRequest, avoided: InstanceId | None = None) -> None:
        """Route ``request`` with all its tokens so far, and give it to its first leg.

        Args:
            avoided: Instance that is not chosen if any other can serve; None for none.
        """
        tokens = request.to_compute + request.cached_tokens
        cached = request.cached_tokens
        if self.store is not None and request.hash_ids and not cached:
            cached = min(self.store.lookup(request.hash_ids, request.prompt_tokens), tokens - 1)
        try:
            asked = RequestView(RequestId(str(request.id)), tokens, cached, request.max_tokens)
            route = self._route(asked, avoided)
        except NoInstanceError:
            if not self.is_lost:
                self._timeline.after(_REPEAT_S, self._send, request)
            return
        request.decode = self.instances[route.decode]
        first = request.decode if route.prefill is None else self.instances[route.prefill]
        request.prefill = first
        if (cache := self.caches.get(first.id)) is not None and request.hash_ids:
            cached = min(cache.lookup(request.hash_ids, request.prompt_tokens), tokens - 1)
            request.resident_tokens = cached
        request.cached_tokens = request.found_tokens = cached
        request.to_compute = tokens - cached
        if first is not request.decode:
            request.decode.expect(request)
        first.take(request, tokens, request.to_compute)
        first.engine.submit(request)

    def _route(self, asked: RequestView, avoided: InstanceId | None) -> Route:
        seen = self.view()
        if avoided is None:
            return self._routing.route(asked, seen)
        left = replace(seen.instances[avoided], ready=False)
        others = replace(seen, instances={**seen.instances, avoided: left})
        try:
            return self._routing.route(asked, others)
        except NoInstanceError:
            return self._routing.route(asked, seen)

    def _prefilled(self, engine: SimEngine, request: SimRequest) -> bool:
        """Hand over a request whose prompt is computed, unless it decodes where it is."""
        here = self.instances[engine.name]
        here.prefilled(request)
        request.comes()
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
        if not target.is_ready:
            self._restart(request)
            return False
        target.take(request, request.kv_tokens)
        target.engine.submit(request)
        return False

    def _fetch(self, engine: SimEngine, request: SimRequest) -> int | None:
        """Bring the KV of ``request``, for which the engine has room; see ``SimBatch``.

        The step that a request joins fetches its KV from this machine's store, as the connector of
        real engines does: it loads nothing beside steps. KV of another machine is first sent to
        that store, and a pull needs no store: both are beside the steps, one after another.
        """
        if request.prefill is None:  # adopted: the KV of the request is here already
            return 0
        self.num_handed_over += 1
        instance = self.instances[engine.name]
        self.num_handed_far += instance.id in request.prefill.far
        distance = request.prefill.far.get(instance.id)
        if distance is not None:
            num_bytes = request.kv_tokens * self._token_bytes
            taken_s = distance.round_trip_s + num_bytes / distance.bytes_per_s
        elif self._system.handover == "store":
            return request.kv_tokens
        else:
            taken_s = request.kv_tokens * self._token_s + 2 * self._hop_s
        instance.link_free_s = max(self._timeline.now_s, instance.link_free_s) + taken_s
        self._timeline.at(instance.link_free_s, self._fetched, request)
        return None

    def _fetched(self, request: SimRequest) -> None:
        engine = request.decode.engine
        if engine.loading.get(request.id) is not request:
            return  # The engine has died: its requests run again elsewhere, or will.
        source, request.held_by = request.held_by, None
        if source is not None and source.is_dead:
            engine.drop(request)
            request.decode.leave(request)
            self._restart(request)
            return
        if source is not None:
            source.release(request.kv_tokens)
        engine.join(request, request.kv_tokens if source is None else 0)

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
        """Return whether all instances are dead for ever, so that requests here never end."""
        everyone = self.instances.values()
        return not self._num_returning and all(one.engine.is_dead for one in everyone)

    def control(self) -> None:
        """Take one turn of the control loop, with the code of the real server."""
        self.placing.bend()
        limits = self._system.control_limits
        view = replace(self.view(), requests=self.observed())
        turn = take_turn(view, self._migration, Mode.ON, False, limits, self._memory)
        self._memory = turn.after
        for told in self.on_turn:
            told(turn)
        if turn.plan.is_ordered:
            self.placing.begin_in_order(turn.begin)
        else:
            for step in turn.begin:
                self.placing.begin(step)

    def rebalance(self, options: RebalanceOptions) -> None:
        """Let streams leave overloaded instances, as the server's rebalancer decides."""
        cluster, now_s = self.view(), self._timeline.now_s
        remaining = remaining_tokens(cluster.output_lengths)
        begun, self._rebalancing = self._rebalancing, set()
        for role in options.roles:
            views = [one for one in cluster.instances.values() if one.role is role and one.ready]
            engines = [self.instances[view.id].engine for view in views]
            loads = [
                decode_load_of(view, engine.num_streams, engine.streams)
                for view, engine in zip(views, engines, strict=True)
            ]
            moves = choose_moves(loads, now_s, options, remaining, begun)
            self._rebalancing.update(moves)
            for source, streams in moves.items():
                for stream in streams:
                    assert isinstance(stream.key, SimRequest)
                    self.instances[source].engine.move_away(stream.key)

    def _left(self, engine: SimEngine, request: SimRequest) -> None:
        self.instances[engine.name].leave(request)
        self.num_rebalanced += 1
        request.rebalanced_s = self._timeline.now_s
        self._keep_stored(request)
        # Not at once: the engine is between two steps.
        self._timeline.at(self._timeline.now_s, self._go_on, (request, engine.name))

    def _go_on(self, told: tuple[SimRequest, InstanceId]) -> None:
        self._send(*told)

    def kill(self, name: InstanceId, back_after_s: float | None) -> None:
        """Let an instance die, with its prefix cache; its requests run again elsewhere.

        Args:
            back_after_s: Time until it serves again, empty, in seconds; None for never.
        """
        dead = self.instances[name]
        lost = dead.engine.kill()
        if (cache := self.caches.get(name)) is not None:
            cache.clear()
        for step in self.placing.lose(dead):
            self._memory = self._memory.with_failed(step.action, self._timeline.now_s)
        dead.is_ready = False
        dead.inflight = dead.inflight_tokens = 0
        dead.forget_prompts()
        dead.is_dirty = True
        self._num_returning += back_after_s is not None
        for request in sorted(lost, key=lambda request: request.id):
            request.uncounted_tokens = 0
            self._restart(request)
        if back_after_s is not None:
            self._timeline.after(back_after_s, self._revive, dead)

    def _revive(self, dead: SimInstance) -> None:
        self._num_returning -= 1
        dead.engine.is_dead = False
        dead.is_ready = True
        dead.changed_s = self._timeline.now_s
        dead.is_dirty = True

    def _restart(self, request: SimRequest) -> None:
        """Run the rest of a request again; only with a store, its whole blocks are kept."""
        self.num_restarted += 1
        if request.held_by is not None and not request.held_by.is_dead:
            request.held_by.release(request.kv_tokens)
        request.held_by = None
        request.comes()
        self._keep_stored(request)
        self._send(request)

    def _keep_stored(self, request: SimRequest) -> None:
        """Let ``request`` begin anew with the blocks that the store has of it."""
        request.start_over()
        if self._system.handover == "store" and request.generated:
            whole = (request.all_tokens - 1) // self._block_tokens * self._block_tokens
            request.cached_tokens, request.to_compute = whole, request.all_tokens - whole


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
