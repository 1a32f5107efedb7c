"""Steps of a decision: modules come home, then roles and step sizes change, then modules leave."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from banaserve.base.types import (
    Distance,
    Influence,
    InstanceFacts,
    InstanceId,
    InstanceView,
    Module,
    ModulePlacement,
    MoveModule,
    ReturnModule,
    Role,
    SetStepTokens,
    Step,
    SwitchRole,
)
from banaserve.orchestrator.control.costs.profile import Profile
from banaserve.orchestrator.control.model.moving import migration_s
from banaserve.orchestrator.control.move_policies.scoring import module_words
from banaserve.orchestrator.control.projection import slabs
from banaserve.orchestrator.planner.candidates.arrangement import Arrangement, Order, assign
from banaserve.orchestrator.planner.decision import Change, Decision, PlannedMove

_TIMEOUT_FACTOR = 5.0
_LEAST_TIMEOUT_S = 5.0


class Wanted(NamedTuple):
    """Planned state of a cluster: an arrangement, and the places of modules.

    Attributes:
        returns: Modules that come home first; other modules away stay there.
        moves: Modules that leave afterwards.
        order: Order of device kinds, which says which devices have which role.
    """

    arrangement: Arrangement
    returns: tuple[ModulePlacement, ...] = ()
    moves: tuple[PlannedMove, ...] = ()
    order: Order = ()

    def __str__(self) -> str:
        words = [str(self.arrangement)]
        if self.order:
            kinds = (kind or "the others" for kind in self.order)
            words.append(f"to prefill {', then '.join(kinds)}")
        words += [f"{module_words(one.module)} of {one.host} home" for one in self.returns]
        words += [f"{module_words(one.module)} of {one.host} at {one.guest}" for one in self.moves]
        return ", ".join(words)


class Ledger:
    """Memory of instances, updated as modules move.

    Args:
        facts: Facts of every instance, as the profile models it.
        placements: Modules that are away at first.
    """

    def __init__(self, facts: InstanceFacts, placements: Iterable[ModulePlacement]) -> None:
        self.facts = facts
        self._away: dict[InstanceId, list[Module]] = {}
        self._held: dict[InstanceId, int] = {}
        for one in placements:
            self.put(one.host, one.guest, one.module, one.guest_bytes)

    def away(self, host: InstanceId) -> Sequence[Module]:
        """Return the modules of ``host`` that run elsewhere."""
        return self._away.get(host, ())

    def is_guest(self, name: InstanceId) -> bool:
        """Return whether modules of other instances run at ``name``."""
        return self._held.get(name, 0) > 0

    def blocks(self, name: InstanceId) -> int:
        """Return the number of KV blocks of ``name``."""
        return slabs.blocks(self.facts, self.away(name), self._held.get(name, 0))

    def put(
        self, host: InstanceId, guest: InstanceId, module: Module, held: int | None = None
    ) -> int:
        """Record that ``module`` runs at ``guest``; return the bytes that it takes there.

        Args:
            held: Bytes that the module takes at the guest; None computes them.
        """
        self._away[host] = [*self.away(host), module]
        if held is None:
            held = slabs.guest_bytes(self.facts, module, self.blocks(host), False)
        self._held[guest] = self._held.get(guest, 0) + held
        return held

    def take_home(self, one: ModulePlacement) -> None:
        """Record that a module runs at its host again."""
        self._away[one.host] = [module for module in self.away(one.host) if module != one.module]
        self._held[one.guest] -= one.guest_bytes


def modelled(
    views: Sequence[InstanceView], facts: InstanceFacts, dilation: float = 1.0
) -> tuple[InstanceView, ...]:
    """Return ``views`` with guest memory and network paths as the profile models them.

    An engine in place of a modelled one has memory of another size, so guest memory is recomputed
    from ``facts``. Modules of an instance with other layers or heads than ``facts`` are left out.
    Network paths are converted to the profile's time.
    """
    ledger, found = Ledger(facts, ()), []
    names = {view.id for view in views}
    for view in views:
        placements = []
        for one in view.placements if is_modelled(view, facts) else ():
            if one.guest in names:
                held = ledger.put(one.host, one.guest, one.module)
                placements.append(replace(one, guest_bytes=held))
        far = {name: modelled_way(way, dilation) for name, way in view.far.items()}
        found.append(replace(view, placements=tuple(placements), far=far))
    return tuple(found)


def modelled_way(distance: Distance | None, dilation: float) -> Distance | None:
    """Return a measured network path in the profile's time, whose seconds last ``dilation``."""
    if distance is None:
        return None
    return Distance(distance.round_trip_s / dilation, distance.bytes_per_s * dilation)


def is_modelled(view: InstanceView, facts: InstanceFacts) -> bool:
    """Return whether an instance has as many layers and KV heads as ``facts``."""
    own = view.facts
    if own is None:
        return False
    return (own.num_layers, own.num_kv_heads) == (facts.num_layers, facts.num_kv_heads)


def placements_of(views: Iterable[InstanceView]) -> tuple[ModulePlacement, ...]:
    """Return the modules of ``views`` that run at a guest beside another of ``views``."""
    found = [one for view in views for one in view.placements]
    names = {view.id for view in views}
    return tuple(one for one in found if one.guest in names)


def must_return(
    wanted: Arrangement,
    views: Sequence[InstanceView],
    placements: Sequence[ModulePlacement],
    order: Order = (),
) -> tuple[ModulePlacement, ...]:
    """Return the modules of ``placements`` that must come home before ``wanted``.

    These are modules whose host or guest changes its role: they were moved because of these roles.
    """
    changed = assign(wanted, views, order)
    return tuple(one for one in placements if one.host in changed or one.guest in changed)


def changes_of(
    wanted: Arrangement,
    views: Sequence[InstanceView],
    feasible: Callable[[int], int] = lambda step_tokens: step_tokens,
    order: Order = (),
) -> tuple[Change, ...]:
    """Return the planned role and step size of each instance, in the order of the changes.

    Instances that will do both come first, then those that will prefill, then those that will
    decode, so that each leg is served at all times.

    Args:
        feasible: Function that returns the step size that engines use if one is requested.
        order: Order of device kinds, which says which devices have which role.
    """
    changed = assign(wanted, views, order)
    roles = {view.id: changed.get(view.id, view.role) for view in views}
    in_turn = (Role.COLOCATED, Role.PREFILL, Role.DECODE)
    return tuple(
        Change(name, role, feasible(wanted.tokens_of(role)))
        for role in in_turn
        for name, own in roles.items()
        if own is role
    )


def steps_of(
    decision: Decision,
    views: Mapping[InstanceId, InstanceView],
    profile: Profile | None,
    dilation: float,
    window_s: float,
) -> tuple[Step, ...]:
    """Return the steps of ``decision``, in their order; a change already in effect needs no step.

    Args:
        profile: Profile for the memory and transfer time of modules; None if no module moves.
        dilation: Wall seconds of one second of the profile.
        window_s: Timeout of a change of role or step size.
    """
    steps: list[Step] = []
    ready = {name: view for name, view in views.items() if view.ready}
    moves = None if profile is None else _MoveSteps(ready, profile, dilation, decision.gain)
    there = {(one.host, one.guest, one.module): one for one in placements_of(ready.values())}
    for wanted in decision.returns:
        one = there.get((wanted.host, wanted.guest, wanted.module))
        if one is not None and moves is not None:
            steps.append(moves.home(one))
    for change in decision.changes:
        view = ready.get(change.instance)
        if view is None:
            continue
        action: SwitchRole | SetStepTokens
        if view.role is not change.role:
            action = SwitchRole(view.id, view.role, change.role, change.step_tokens)
        elif view.step_tokens != change.step_tokens:
            action = SetStepTokens(view.id, view.step_tokens, change.step_tokens)
        else:
            continue
        steps.append(Step(action, (), 0.0, decision.gain, window_s))
    for move in decision.moves:
        if move.host in ready and move.guest in ready and moves is not None:
            steps.append(moves.away(move))
    return tuple(steps)


class _MoveSteps:
    """Steps of modules, made in their order: each finds the memory that those before it leave."""

    def __init__(
        self,
        views: Mapping[InstanceId, InstanceView],
        profile: Profile,
        dilation: float,
        gain: float,
    ) -> None:
        self._views, self._profile, self._dilation, self._gain = views, profile, dilation, gain
        self._ledger = Ledger(profile.facts, placements_of(views.values()))

    def home(self, one: ModulePlacement) -> Step:
        action = ReturnModule(one.host, one.guest, one.module, self._bytes(one.host, one.module))
        self._ledger.take_home(one)
        felt = (one.guest, Influence(guest_bytes=-one.guest_bytes))
        return self._timed(action, (felt,), self._views[one.guest].far.get(one.host))

    def away(self, move: PlannedMove) -> Step:
        host, guest, module = move
        action = MoveModule(host, guest, module, self._bytes(host, module))
        before = {name: self._ledger.blocks(name) for name in (host, guest)}
        held = self._ledger.put(*move)
        grown = {name: self._ledger.blocks(name) - before[name] for name in before}
        felt = {
            host: Influence(kv_blocks=grown[host]),
            guest: Influence(kv_blocks=grown[guest], guest_bytes=held),
        }
        return self._timed(action, tuple(sorted(felt.items())), self._views[host].far.get(guest))

    def _bytes(self, host: InstanceId, module: Module) -> int:
        """Return the bytes to transfer: the weights of ``module``, and its KV in use."""
        report = self._views[host].report
        used = 0.0 if report is None else report.kv_used_fraction * self._ledger.blocks(host)
        return slabs.moved_bytes(self._profile.facts, module, used, False)

    def _timed(
        self,
        action: MoveModule | ReturnModule,
        felt: tuple[tuple[InstanceId, Influence], ...],
        distance: Distance | None,
    ) -> Step:
        link = self._profile.link.over(modelled_way(distance, self._dilation))
        cost_s = migration_s(action.num_bytes, link) * self._dilation
        timeout_s = max(_LEAST_TIMEOUT_S * self._dilation, _TIMEOUT_FACTOR * cost_s)
        return Step(action, felt, cost_s, self._gain, timeout_s)
