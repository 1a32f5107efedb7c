"""Steps of a decision: modules come home, then roles and step sizes change, then modules leave."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

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

_TIMEOUT_FACTOR = 5.0
_LEAST_TIMEOUT_S = 5.0


class PlannedMove(NamedTuple):
    """A module that is to leave ``host`` for ``guest``."""

    host: InstanceId
    guest: InstanceId
    module: Module


class Change(NamedTuple):
    """Planned role and step size of one instance."""

    instance: InstanceId
    role: Role
    step_tokens: int


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


class Ordered(Protocol):
    """Planned changes in their order: ``returns`` come home, then ``changes``, then ``moves``."""

    @property
    def returns(self) -> Sequence[ModulePlacement]: ...

    @property
    def changes(self) -> Sequence[Change]: ...

    @property
    def moves(self) -> Sequence[PlannedMove]: ...

    @property
    def gain(self) -> float: ...


def steps_of(
    ordered: Ordered,
    views: Mapping[InstanceId, InstanceView],
    profile: Profile | None,
    dilation: float,
    window_s: float,
) -> tuple[Step, ...]:
    """Return the steps of ``ordered``, in their order; a change already in effect needs no step.

    Args:
        profile: Profile for the memory and transfer time of modules; None if no module moves.
        dilation: Wall seconds of one second of the profile.
        window_s: Timeout of a change of role or step size.
    """
    steps: list[Step] = []
    gain = ordered.gain
    ready = {name: view for name, view in views.items() if view.ready}
    placements = placements_of(ready.values())
    ledger = None if profile is None else Ledger(profile.facts, placements)
    there = {(one.host, one.guest, one.module): one for one in placements}
    for wanted in ordered.returns:
        one = there.get((wanted.host, wanted.guest, wanted.module))
        if one is not None and ledger is not None and profile is not None:
            steps.append(_return_step(one, ready, ledger, profile, dilation, gain))
            ledger.take_home(one)
    for change in ordered.changes:
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
        steps.append(Step(action, (), 0.0, gain, window_s))
    for move in ordered.moves:
        if move.host in ready and move.guest in ready and ledger and profile is not None:
            steps.append(_move_step(move, ready, ledger, profile, dilation, gain))
    return tuple(steps)


def _return_step(
    one: ModulePlacement,
    views: Mapping[InstanceId, InstanceView],
    ledger: Ledger,
    profile: Profile,
    dilation: float,
    gain: float,
) -> Step:
    used = _used_blocks(views[one.host], ledger)
    num_bytes = slabs.moved_bytes(profile.facts, one.module, used, False)
    action = ReturnModule(one.host, one.guest, one.module, num_bytes)
    felt = (one.guest, Influence(guest_bytes=-one.guest_bytes))
    distance = views[one.guest].far.get(one.host)
    return _timed(action, (felt,), num_bytes, profile, distance, dilation, gain)


def _move_step(
    move: PlannedMove,
    views: Mapping[InstanceId, InstanceView],
    ledger: Ledger,
    profile: Profile,
    dilation: float,
    gain: float,
) -> Step:
    used = _used_blocks(views[move.host], ledger)
    num_bytes = slabs.moved_bytes(profile.facts, move.module, used, False)
    before = {name: ledger.blocks(name) for name in (move.host, move.guest)}
    held = ledger.put(*move)
    grown = {name: ledger.blocks(name) - before[name] for name in before}
    felt = {
        move.host: Influence(kv_blocks=grown[move.host]),
        move.guest: Influence(kv_blocks=grown[move.guest], guest_bytes=held),
    }
    action = MoveModule(move.host, move.guest, move.module, num_bytes)
    distance = views[move.host].far.get(move.guest)
    both = tuple(sorted(felt.items()))
    return _timed(action, both, num_bytes, profile, distance, dilation, gain)


def _timed(
    action: MoveModule | ReturnModule,
    felt: tuple[tuple[InstanceId, Influence], ...],
    num_bytes: int,
    profile: Profile,
    distance: Distance | None,
    dilation: float,
    gain: float,
) -> Step:
    link = profile.between.over(modelled_way(distance, dilation))
    cost_s = migration_s(num_bytes, link) * dilation
    timeout_s = max(_LEAST_TIMEOUT_S * dilation, _TIMEOUT_FACTOR * cost_s)
    return Step(action, felt, cost_s, gain, timeout_s)


def _used_blocks(view: InstanceView, ledger: Ledger) -> float:
    report = view.report
    return 0.0 if report is None else report.kv_used_fraction * ledger.blocks(view.id)
