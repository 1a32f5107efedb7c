"""Effects of a move on KV blocks, compute and step times, without judging them."""

from __future__ import annotations

from typing import NamedTuple

from banaserve.base.types import Influence, Module
from banaserve.orchestrator.control.model import moving
from banaserve.orchestrator.control.move_policies.options import MoveOptions, RepairedOptions
from banaserve.orchestrator.control.projection import slabs
from banaserve.orchestrator.control.projection.projection import Projected


class MemoryEffect(NamedTuple):
    """Change of memory when a module goes to its guest or returns to its host.

    Attributes:
        host_blocks: Change of the host's KV blocks; negative when a module comes home.
        guest_blocks: Change of the KV blocks of the guest's instance.
        guest_bytes: Change of the memory that guests hold there.
        moved_bytes: Bytes to transfer.
    """

    host_blocks: int
    guest_blocks: int
    guest_bytes: int
    moved_bytes: int


def memory_effect(
    host: Projected, guest: Projected, module: Module, options: MoveOptions
) -> MemoryEffect:
    """Return the change of memory when ``module`` goes to ``guest``, or home if it is away."""
    is_away = module in host.away
    home = host.home.moved(host.facts, module, is_away)
    host_after = host.blocks_with(home, host.guest_bytes)
    shared = options.weights_are_shared
    if is_away:
        held = -host.away[module].guest_bytes
    else:
        held = slabs.guest_bytes(host.facts, module, host_after, shared)
    guest_after = guest.blocks_with(guest.home, max(0, guest.guest_bytes + held))
    used = min(host.wanted_blocks, host.kv_blocks)
    return MemoryEffect(
        host_after - host.kv_blocks,
        guest_after - guest.kv_blocks,
        held,
        slabs.moved_bytes(host.facts, module, used, shared),
    )


def hop_step_s(host: Projected, guest: Projected, module: Module, options: MoveOptions) -> float:
    """Return the seconds that a module at ``guest`` adds to each step of its host."""
    link = options.hop.over(host.far.get(guest.id))
    return moving.hop_s(host.facts, module, host.batch_tokens, link)


def overlap_of(host: Projected, options: RepairedOptions) -> float:
    """Return the share of a guest's work that ``host`` does not wait for.

    It is the host's reported value, else the option.
    """
    said = host.overlap_fraction
    return options.overlap_fraction if said is None else said


def influences(
    host: Projected,
    guest: Projected,
    module: Module,
    effect: MemoryEffect,
    options: RepairedOptions,
) -> tuple[Influence, Influence]:
    """Return the influences on host and guest of a module that leaves, or comes home.

    The work of the module, a ``share`` of all the host's work, loads the guest in full. It relieves
    the host only by the share ``overlap_of``: for the rest, host and guest take turns, and the
    host's step takes as long as before, or longer with a slower guest. Each hop lengthens the step,
    which costs compute of the host, too. A module that is away already is taken to come home.
    """
    share = slabs.compute_share(host.facts, module, options.attention_fraction)
    overlap = overlap_of(host, options)
    gone = 0.0
    if host.away and overlap:
        fraction = options.attention_fraction
        gone = sum(slabs.compute_share(host.facts, other, fraction) for other in host.away)
    left = max(1 - overlap * gone, 1e-9)
    whole_compute, whole_step_s = host.compute / left, host.step_s / left
    hop_s = hop_step_s(host, guest, module, options)
    hop_compute = host.compute * min(1.0, hop_s / host.step_s) if host.step_s > 0 else 0.0
    sign = -1.0 if module in host.away else 1.0
    work = sign * share * whole_compute
    times_there = host.facts.speed / guest.facts.speed
    longer = (times_there - 1) * (1 - overlap)
    on_host = Influence(
        compute=sign * hop_compute - overlap * work + longer * work,
        kv_blocks=effect.host_blocks,
        step_s=sign * (hop_s - overlap * share * whole_step_s + longer * share * whole_step_s),
    )
    work_there = work * times_there
    room = max(0.1, 1 - max(0.0, work_there))
    on_guest = Influence(
        compute=work_there,
        kv_blocks=effect.guest_blocks,
        guest_bytes=effect.guest_bytes,
        step_s=guest.step_s * (1 / room - 1),
    )
    return on_host, on_guest
