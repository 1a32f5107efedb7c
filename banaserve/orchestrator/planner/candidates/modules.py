"""Modules that could leave their instances, and a bound of the gain by the cost model.

Only candidates with a sufficient bound are forecast: a forecast takes a hundred times as long.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from banaserve.base.types import Distance, InstanceId, InstanceView, Module, ModulePlacement
from banaserve.orchestrator.control.costs import modules as costs
from banaserve.orchestrator.control.costs.profile import Profile
from banaserve.orchestrator.control.costs.steps import StepCosts
from banaserve.orchestrator.control.model.learnt_time import StepWork
from banaserve.orchestrator.control.move_policies.options import MoveOptions
from banaserve.orchestrator.control.move_policies.pairs import sizes
from banaserve.orchestrator.control.projection import slabs
from banaserve.orchestrator.planner.candidates.planning import Ledger, is_modelled
from banaserve.orchestrator.planner.decision import PlannedMove
from banaserve.orchestrator.planner.forecasting.forecast import InstanceUse

KINDS = ("layers", "heads")

_LIMITS = MoveOptions()
"""Limits of modules away, and of the memory that an instance keeps, as in the other policies."""

_SIZES = 3
"""Number of module sizes to try, the largest allowed ones: below them the bound is linear."""


class Bounded(NamedTuple):
    """Moves to make together, and a bound of the share by which hosts could serve more."""

    moves: tuple[PlannedMove, ...]
    bound: float


def candidates(
    kinds: Sequence[str],
    use: Sequence[InstanceUse],
    views: Mapping[InstanceId, InstanceView],
    placements: Sequence[ModulePlacement],
    profile: Profile,
) -> list[Bounded]:
    """Return the moves from the instance with the greatest need, or from all with half of it.

    Args:
        use: Use of each instance without these moves.
        placements: Modules that are away and stay there.
    """
    needs = {one.instance: _need(one, kinds, profile) for one in use}
    found = []
    for kind in kinds:
        hosts = sorted(needs, key=lambda name: (-needs[name], name))
        hosts = [
            name for name in hosts if needs[name] > 0 and _may_move(views[name], kind, profile)
        ]
        if not hosts:
            continue
        alike = [name for name in hosts if needs[name] >= needs[hosts[0]] / 2]
        groups = [hosts[:1]] if len(alike) == 1 else [hosts[:1], alike]
        for size in _sizes(kind, profile):
            for group in groups:
                moves = _moved(kind, size, group, use, views, placements, profile)
                if len(moves) == len(group):
                    bound = bound_of(moves, use, views, placements, profile)
                    found.append(Bounded(moves, bound))
    return sorted(found, key=lambda one: -one.bound)


def bound_of(
    moves: Sequence[PlannedMove],
    use: Sequence[InstanceUse],
    views: Mapping[InstanceId, InstanceView],
    placements: Sequence[ModulePlacement],
    profile: Profile,
) -> float:
    """Return the maximum share by which hosts could serve more, minus the certain loss of guests.

    If requests wait for KV memory, a host gains as much as its memory grows. Its steps become
    shorter by the work that the guest computes concurrently, minus the messages. A busy guest loses
    the time of the module's work, and a guest on another machine costs ``far_loss``.
    """
    of = {one.instance: one for one in use}
    before, after = (Ledger(profile.facts, placements) for _ in range(2))
    gain = 0.0
    for move in moves:
        host, guest = of[move.host], of[move.guest]
        after.put(*move)
        room = after.blocks(move.host) / max(1, before.blocks(move.host)) - 1
        gain += host.short_fraction * max(0.0, room)
        gain += host.busy_fraction * max(0.0, net_relief(profile, move.module, host.work))
        lost = far_loss(views[move.host], move.guest, move.module, host.work, profile)
        gain -= host.busy_fraction * lost
        share = slabs.compute_share(
            profile.facts, move.module, costs.attention_fraction(profile, host.work)
        )
        gain -= share * host.busy_fraction * max(0.0, guest.busy_fraction + share - 1)
    return gain / len(of)


def net_relief(
    profile: Profile, module: Module, work: StepWork, distance: Distance | None = None
) -> float:
    """Return the share by which a step of ``work`` is shorter with ``module`` away; may be below 0.

    Args:
        distance: Network path to the guest's machine; None if the guest is on the same machine.
    """
    step_s = step_time_s(profile, work)
    if step_s <= 0:
        return 0.0
    tokens = int(work.prefill_tokens + work.decode_requests)
    hop_s = costs.hop_s(profile, module, tokens, distance)
    return costs.relief(profile, module, work) - hop_s / step_s


def step_time_s(profile: Profile, work: StepWork) -> float:
    """Return the time of a step of ``work`` with all modules at home, in seconds."""
    told, _ = StepCosts(profile).mixed_s(
        int(work.prefill_tokens),
        int(work.prefill_pairs),
        int(work.decode_requests),
        int(work.context_tokens),
    )
    return told


def _sizes(kind: str, profile: Profile) -> Iterator[int]:
    total = slabs.num_movable(profile.facts, kind == "heads")
    yield from list(sizes(int(total * _LIMITS.max_away_fraction)))[-_SIZES:]


def _need(one: InstanceUse, kinds: Sequence[str], profile: Profile) -> float:
    """Return how much an instance could gain from less work or more memory, for comparison only."""
    reliefs = [0.0]
    for kind in kinds:
        for size in _sizes(kind, profile):
            module = slabs.free(profile.facts, (), size, kind == "heads")
            if module is not None:
                reliefs.append(net_relief(profile, module, one.work))
    return one.short_fraction + one.busy_fraction * max(reliefs)


def _may_move(view: InstanceView, kind: str, profile: Profile) -> bool:
    facts = view.facts
    if facts is None or not is_modelled(view, profile.facts):
        return False
    return facts.can_move_heads if kind == "heads" else facts.can_move_layers


def _moved(
    kind: str,
    size: int,
    hosts: Sequence[InstanceId],
    use: Sequence[InstanceUse],
    views: Mapping[InstanceId, InstanceView],
    placements: Sequence[ModulePlacement],
    profile: Profile,
) -> tuple[PlannedMove, ...]:
    """Return a move of one module of each host, each to the guest with the least work by then.

    Hosts without a possible move are left out.
    """
    facts = profile.facts
    ledger = Ledger(facts, placements)
    loads = {one.instance: one.busy_fraction for one in use}
    of = {one.instance: one for one in use}
    moves: list[PlannedMove] = []
    for host in hosts:
        if ledger.is_guest(host) or ledger.away(host):
            continue
        module = slabs.free(facts, ledger.away(host), size, kind == "heads")
        if module is None:
            continue
        share = slabs.compute_share(facts, module, costs.attention_fraction(profile, of[host].work))
        lost = {name: far_loss(views[host], name, module, of[host].work, profile) for name in loads}
        for guest in sorted(loads, key=lambda name: (loads[name] + lost[name], name)):
            is_free = guest not in hosts and not ledger.away(guest) and lost[guest] < 1
            if not is_free or not _may_move(views[guest], kind, profile):
                continue
            trial = Ledger(facts, placements)
            for one in (*moves, PlannedMove(host, guest, module)):
                trial.put(*one)
            if not has_room(trial, guest, of[guest].kv_tokens):
                continue
            ledger = trial
            moves.append(PlannedMove(host, guest, module))
            loads[guest] += share * of[host].busy_fraction
            break
    return tuple(moves)


def far_loss(
    host: InstanceView, guest: InstanceId, module: Module, work: StepWork, profile: Profile
) -> float:
    """Return the extra cost of a guest on another machine, as a share of a step of ``work``.

    The share is 1 if the network path to that machine has not been measured, and 0 for a guest on
    the same machine.
    """
    if guest not in host.far:
        return 0.0
    distance = host.far[guest]
    if distance is None:
        return 1.0
    near, far = (net_relief(profile, module, work, to) for to in (None, distance))
    return min(1.0, near - far)


def has_room(ledger: Ledger, guest: InstanceId, kv_tokens: float) -> bool:
    """Return whether a guest keeps memory for the KV that it uses, and a reserve."""
    left = ledger.blocks(guest)
    own = slabs.blocks(ledger.facts, (), 0)
    used = kv_tokens / ledger.facts.block_tokens
    return left >= max(1.0, _LIMITS.min_blocks_fraction * own) and (
        used <= _LIMITS.memory_limit_fraction * left
    )
