"""Hosts and guests of moves: the fullest and emptiest instances, and what forbids a move."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import NamedTuple

from banaserve.base.types import Attempt, InstanceId, Module
from banaserve.orchestrator.control.move_policies import effects
from banaserve.orchestrator.control.move_policies.interface import Rejected, RejectReason
from banaserve.orchestrator.control.move_policies.options import RepairedOptions
from banaserve.orchestrator.control.projection import slabs
from banaserve.orchestrator.control.projection.projection import Projected, Projection

BREADTH = 2
"""Number of hosts, and of guests for each host, that are considered for one resource."""

_SORTED = 256
"""Number of instances up to which sorting all is faster than searching for both ends."""


class Pair(NamedTuple):
    """A host, a guest and the difference of their loads."""

    host: Projected
    guest: Projected
    gap: float


def may_change(
    instance: Projected, now_s: float, dwell_s: float, max_moves: float
) -> RejectReason | None:
    """Return why ``instance`` must not change at present, or None."""
    if instance.num_moves >= max_moves:
        return RejectReason.BUSY
    if instance.changed_s is not None and now_s - instance.changed_s < dwell_s:
        return RejectReason.DWELL
    return None


def may_host(host: Projected) -> RejectReason | None:
    """Return why ``host`` may not give modules away, or None.

    An instance that holds modules of others sends those home first: else loads would move in
    circles, and a request's step would wait for a chain of instances.
    """
    return RejectReason.HOST_IS_GUEST if host.num_guests else None


def may_guest(guest: Projected) -> RejectReason | None:
    """Return why ``guest`` may not take modules, or None."""
    return RejectReason.GUEST_SHEDS if guest.away else None


def may_pair(host: Projected, guest: Projected, heads: bool) -> RejectReason | None:
    """Return why no heads, or no layers, may move from ``host`` to ``guest``, or None."""
    if guest.id in host.far and host.far[guest.id] is None:
        return RejectReason.NOT_MEASURED
    ours, theirs = host.facts, guest.facts
    supported = (
        ours.can_move_heads and theirs.can_move_heads
        if heads
        else ours.can_move_layers and theirs.can_move_layers
    )
    if not supported:
        return RejectReason.NOT_SUPPORTED
    dimensions = (ours.num_layers, ours.num_kv_heads, ours.layer_weight_bytes)
    others = (theirs.num_layers, theirs.num_kv_heads, theirs.layer_weight_bytes)
    if dimensions != others or ours.layer_token_bytes != theirs.layer_token_bytes:
        return RejectReason.OTHER_MODEL
    return None


def sizes(limit: int) -> Iterator[int]:
    """Yield 1, 2, 4 and so on up to ``limit``."""
    size = 1
    while size <= limit:
        yield size
        size *= 2


def memory_pairs(
    projection: Projection, now_s: float, options: RepairedOptions, refused: list[Rejected]
) -> list[Pair]:
    """Return pairs between which memory load could be balanced.

    Args:
        refused: List to which rejected instances are appended.
    """
    instances = projection.values()
    loads = [one.wanted_blocks / one.kv_blocks for one in instances]
    return _pairs(instances, loads, now_s, options, refused)


def compute_pairs(
    projection: Projection, now_s: float, options: RepairedOptions, refused: list[Rejected]
) -> list[Pair]:
    """Return pairs between which compute load could be balanced.

    Hosts that take turns with their guests are left out: for them, a remote layer takes as long as
    a layer of their own.

    Args:
        refused: List to which rejected instances are appended.
    """
    instances = projection.values()
    loads = [one.compute + one.waiting for one in instances]
    pairs = _pairs(instances, loads, now_s, options, refused)
    able = [pair for pair in pairs if effects.overlap_of(pair.host, options) > 0]
    if able:
        return able
    for pair in pairs[:1]:
        words = f"move layers for compute from {pair.host.id} to {pair.guest.id}"
        refused.append(Rejected(words, RejectReason.NO_OVERLAP, pair.gap))
    return []


def _pairs(
    instances: Iterable[Projected],
    loads: Iterable[float],
    now_s: float,
    options: RepairedOptions,
    refused: list[Rejected],
) -> list[Pair]:
    def usable(
        found: Sequence[tuple[float, InstanceId, Projected]],
        role: str,
        may: Callable[[Projected], RejectReason | None],
    ) -> list[tuple[float, Projected]]:
        able = []
        limits = (now_s, options.dwell_s, options.max_moves_per_instance)
        for load, name, instance in found:
            if reason := may(instance) or may_change(instance, *limits):
                refused.append(Rejected(f"{name} as {role}", reason, load))
            else:
                able.append((load, instance))
        return able[:BREADTH]

    # More than needed, since the fullest and emptiest instances may not change at present.
    look = 4 * BREADTH
    loaded = [(load, one.id, one) for load, one in zip(loads, instances, strict=True)]
    if len(loaded) <= _SORTED:
        loaded.sort()
        fullest, emptiest = loaded[: -look - 1 : -1], loaded[:look]
    else:
        fullest, emptiest = heapq.nlargest(look, loaded), heapq.nsmallest(look, loaded)
    able_hosts = usable(fullest, "host", may_host)
    able_guests = usable(emptiest, "guest", may_guest)
    return [
        Pair(host, guest, most - least)
        for most, host in able_hosts
        for least, guest in able_guests
        if most - least > options.delta_down
    ]


def modules(
    pair: Pair,
    heads: bool,
    options: RepairedOptions,
    refused: list[Rejected],
    failed: Container[Attempt] = (),
) -> Iterator[Module]:
    """Yield the layers, or the heads of all layers, that could move, smallest first.

    Args:
        heads: True for heads, False for layers.
        refused: List to which rejected candidates are appended.
        failed: Attempts that must not be repeated yet.
    """
    facts = pair.host.facts
    kind = f"move {'heads' if heads else 'layers'} from {pair.host.id} to {pair.guest.id}"
    if pair.gap < (options.delta_heads if heads else options.delta_layers):
        refused.append(Rejected(kind, RejectReason.GAP_TOO_SMALL, pair.gap))
        return
    if Attempt("heads" if heads else "layers", pair.host.id, pair.guest.id) in failed:
        refused.append(Rejected(kind, RejectReason.FAILED))
        return
    if reason := may_pair(pair.host, pair.guest, heads):
        refused.append(Rejected(kind, reason))
        return
    total, taken = slabs.num_movable(facts, heads), pair.host.taken
    for size in sizes(int(total * options.max_away_fraction)):
        module = slabs.free(facts, taken, size, heads)
        if module is None:
            refused.append(Rejected(f"{kind}, {size} of {total}", RejectReason.NO_MODULE))
            return
        yield module
