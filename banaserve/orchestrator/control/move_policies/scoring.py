"""Benefit and cost of a candidate: BanaServe Eqs. 2, 29 and 35 in corrected form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import inf
from typing import NamedTuple

from banaserve.base.types import (
    Action,
    Influence,
    InstanceId,
    Module,
    MoveModule,
    ReturnModule,
    Role,
    Step,
    SwitchRole,
)
from banaserve.orchestrator.control.model.moving import migration_s, within_budget
from banaserve.orchestrator.control.model.utilisation import efficiency, pressure
from banaserve.orchestrator.control.move_policies import effects, switching
from banaserve.orchestrator.control.move_policies.effects import MemoryEffect
from banaserve.orchestrator.control.move_policies.interface import Rejected, RejectReason
from banaserve.orchestrator.control.move_policies.options import MoveOptions, RepairedOptions
from banaserve.orchestrator.control.move_policies.switching import Switch
from banaserve.orchestrator.control.projection import slabs
from banaserve.orchestrator.control.projection.projection import Projected, Projection

LEAST_FALL = 1e-6
"""Least fall of the pressure that is not rounding; without it, plans might never end."""


Influences = tuple[tuple[InstanceId, Influence], ...]


class Weighed(NamedTuple):
    """A candidate that may be taken.

    Attributes:
        felt: Function that returns its influences by instance, in the order of ids; called only for
            the best candidate.
        efficiency: Ratio of benefit to cost, at least rho.
        net_s: Benefit minus rho times cost, by which candidates are compared. Efficiency alone
            would always favour the smallest module, since relief has diminishing returns.
    """

    words: str
    action: Action
    felt: Callable[[], Influences]
    cost_s: float
    benefit_s: float
    timeout_s: float
    efficiency: float
    net_s: float

    def step(self) -> Step:
        """Return the candidate as a step of a plan, for the projection in which it was weighed."""
        return Step(self.action, self.felt(), self.cost_s, self.benefit_s, self.timeout_s)


def words_of(kind: str, module: Module, source: InstanceId, target: InstanceId) -> str:
    """Return a human-readable description of a move."""
    return f"{kind} {module_words(module)} from {source} to {target}"


def module_words(module: Module) -> str:
    """Return a human-readable description of a module."""
    layers = f"layers {module.first_layer}:{module.end_layer}"
    return f"heads {','.join(map(str, module.heads))} of {layers}" if module.heads else layers


def room_refusal(
    instance: Projected, added_blocks: int, options: MoveOptions
) -> RejectReason | None:
    """Return ``NO_ROOM`` if ``instance`` would lack blocks for its use and its reserve, else None.

    A gain of blocks is always allowed, even for a full instance.
    """
    if added_blocks >= 0:
        return None
    left_blocks = instance.kv_blocks + added_blocks
    if left_blocks < max(1.0, options.min_blocks_fraction * instance.own_blocks):
        return RejectReason.NO_ROOM
    too_full = instance.wanted_blocks > options.memory_limit_fraction * left_blocks
    return RejectReason.NO_ROOM if too_full else None


def weigh_move(
    host: Projected, guest: Projected, module: Module, options: RepairedOptions
) -> Weighed | Rejected:
    """Return the move of ``module`` to ``guest`` with its benefit, or why it is rejected."""
    words = words_of("move", module, host.id, guest.id)
    share = slabs.share(host.facts, module)
    heads_share = len(module.heads) / host.facts.num_kv_heads
    if max(host.away_share + share, heads_share) > options.max_away_fraction:
        return Rejected(words, RejectReason.TOO_MUCH_AWAY, host.away_share + share)
    effect = effects.memory_effect(host, guest, module, options)
    if effect.host_blocks <= 0 and effects.overlap_of(host, options) == 0:
        return Rejected(words, RejectReason.NO_BLOCK_FREED)
    action = MoveModule(host.id, guest.id, module, effect.moved_bytes)
    weighed = _weigh_module(words, action, host, guest, effect, options)
    if isinstance(weighed, Rejected) and guest.id in host.far:
        near = _weigh_module(words, action, replace(host, far={}), guest, effect, options)
        if isinstance(near, Weighed):
            hop_s = effects.hop_step_s(host, guest, module, options)
            return Rejected(words, RejectReason.TOO_FAR, hop_s)
    return weighed


def most_net_s(host: Projected, guest: Projected, options: RepairedOptions) -> float:
    """Return an upper bound of the net benefit of moving any module of ``host`` to ``guest``.

    A move relieves only its host. If host and guest take turns, it relieves at most all of the
    host's memory pressure. If they overlap, or the guest is faster, the bound is infinite, since
    the host with the fullest memory need not be the one with the greatest relief.
    """
    if effects.overlap_of(host, options) > 0 or guest.facts.speed > host.facts.speed:
        return inf
    return pressure(host.memory_load) * options.horizon_s - options.rho * options.link_sync_s


def weigh_return(
    host: Projected, guest: Projected, module: Module, options: RepairedOptions
) -> Weighed | Rejected:
    """Return the return of ``module`` to its host with its benefit, or why it is rejected."""
    words = words_of("return", module, guest.id, host.id)
    effect = effects.memory_effect(host, guest, module, options)
    action = ReturnModule(host.id, guest.id, module, effect.moved_bytes)
    return _weigh_module(words, action, host, guest, effect, options)


def _weigh_module(
    words: str,
    action: MoveModule | ReturnModule,
    host: Projected,
    guest: Projected,
    effect: MemoryEffect,
    options: RepairedOptions,
) -> Weighed | Rejected:
    for instance, added in ((host, effect.host_blocks), (guest, effect.guest_blocks)):
        if refusal := room_refusal(instance, added, options):
            return Rejected(words, refusal, (instance.kv_blocks + added) / instance.kv_blocks)
    on_host, on_guest = effects.influences(host, guest, action.module, effect, options)
    for instance, influence in ((host, on_host), (guest, on_guest)):
        if over := _over_budget(instance, influence, options):
            return Rejected(words, over, instance.step_s + influence.step_s)
    share = slabs.share(host.facts, action.module)
    remote = options.remote_cost * (share if isinstance(action, MoveModule) else -share)
    fall = _fall(host, on_host) + _fall(guest, on_guest) - remote
    cost_s = migration_s(effect.moved_bytes, options.link.over(host.far.get(guest.id)))
    first, second = (host.id, on_host), (guest.id, on_guest)
    both = (first, second) if first[0] < second[0] else (second, first)
    return _judged(words, action, lambda: both, fall, cost_s, options)


def weigh_switch(
    projection: Projection, switch: Switch, options: RepairedOptions
) -> Weighed | Rejected:
    """Return a role switch with its benefit, or why it is rejected."""
    words = f"switch {switch.words}"
    felt = partial(switching.influence, projection, switch, options.horizon_s)
    action = SwitchRole(switch.instance.id, switch.old, switch.new)
    return _judged(words, action, felt, switch.fall, options.role_switch_s, options)


def _judged(
    words: str,
    action: Action,
    felt: Callable[[], Influences],
    fall: float,
    cost_s: float,
    options: RepairedOptions,
) -> Weighed | Rejected:
    if fall <= LEAST_FALL:
        return Rejected(words, RejectReason.NO_BENEFIT, fall)
    ratio = efficiency(fall, options.horizon_s, cost_s)
    if ratio < options.rho:
        return Rejected(words, RejectReason.NOT_WORTH_IT, ratio)
    benefit_s = fall * options.horizon_s
    net_s = benefit_s - options.rho * cost_s
    timeout_s = options.timeout_s(cost_s)
    return Weighed(words, action, felt, cost_s, benefit_s, timeout_s, ratio, net_s)


def _over_budget(
    instance: Projected, influence: Influence, options: RepairedOptions
) -> RejectReason | None:
    """Return which budget of Eq. 29 ``influence`` violates, or None.

    The step is a decode instance's TPOT; queue and step are a prefill instance's TTFT.
    """
    after_s = instance.step_s + influence.step_s
    if instance.role is not Role.PREFILL and not within_budget(
        instance.step_s, after_s, options.tpot_budget_s
    ):
        return RejectReason.TPOT_BUDGET
    waiting_s = instance.waiting * options.horizon_s
    if instance.role is not Role.DECODE and not within_budget(
        waiting_s + instance.step_s, waiting_s + after_s, options.ttft_budget_s
    ):
        return RejectReason.TTFT_BUDGET
    return None


def _fall(instance: Projected, influence: Influence) -> float:
    """Return by how much the pressure of one instance falls."""
    compute = max(0.0, instance.compute + influence.compute) + instance.waiting
    memory = instance.wanted_blocks / max(1, instance.kv_blocks + influence.kv_blocks)
    before = pressure(instance.compute_load) + pressure(instance.memory_load)
    return before - pressure(compute) - pressure(memory)
