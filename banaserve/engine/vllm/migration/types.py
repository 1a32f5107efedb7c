"""Units that can move, and the phases of a move.

A unit is a range of layers, KV heads of some layers, or their older KV blocks. ``ALLOWED`` is the
table of phases that may follow each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import msgspec

from banaserve.errors import MigrationError


class LayerRange(msgspec.Struct, frozen=True, tag="layers"):
    """Decoder layers ``start`` to ``end - 1``: weights and KV cache."""

    start: int
    end: int

    @property
    def layers(self) -> range:
        return range(self.start, self.end)

    def __str__(self) -> str:
        return f"layers {self.start}:{self.end}"


class HeadSet(msgspec.Struct, frozen=True, tag="heads"):
    """KV heads by layer, each with the query heads of its group: KV cache only."""

    heads: dict[int, tuple[int, ...]]

    @property
    def layers(self) -> list[int]:
        return sorted(self.heads)

    def __str__(self) -> str:
        parts = (f"{layer}/{','.join(map(str, self.heads[layer]))}" for layer in self.layers)
        return f"heads {' '.join(parts)}"


class Context(msgspec.Struct, frozen=True, tag="context"):
    """Older KV blocks of layers ``start`` to ``end - 1``: those that are full when they move."""

    start: int
    end: int

    @property
    def layers(self) -> range:
        return range(self.start, self.end)

    def __str__(self) -> str:
        return f"older blocks of layers {self.start}:{self.end}"


Modules = LayerRange | HeadSet | Context


class ModelGeometry(msgspec.Struct, frozen=True):
    """Sizes that units are checked against; ``num_kv_heads`` are those of this worker."""

    num_layers: int
    num_kv_heads: int


def check_shape(modules: Modules, shape: ModelGeometry) -> None:
    """Refuse what the model does not have.

    Raises:
        MigrationError: An empty range, an empty set, or an unknown layer or head.
    """
    if isinstance(modules, LayerRange):
        if not 0 <= modules.start < modules.end <= shape.num_layers:
            raise MigrationError(
                f"{modules} is empty or outside of 0:{shape.num_layers}: "
                f"name a range START:END within it"
            )
        if modules.end - modules.start == shape.num_layers:
            raise MigrationError("every layer would leave: keep at least one on the host")
        return
    if isinstance(modules, Context):
        if not 0 <= modules.start < modules.end <= shape.num_layers:
            raise MigrationError(
                f"{modules}: name a range START:END of layers within 0:{shape.num_layers}"
            )
        return
    if not modules.heads:
        raise MigrationError("no heads are named")
    for layer, heads in modules.heads.items():
        _check_heads(layer, heads, shape)


def _check_heads(layer: int, heads: tuple[int, ...], shape: ModelGeometry) -> None:
    if not 0 <= layer < shape.num_layers:
        raise MigrationError(f"there is no layer {layer}: the model has {shape.num_layers}")
    if not heads:
        raise MigrationError(f"no heads of layer {layer} are named")
    if len(set(heads)) != len(heads):
        raise MigrationError(f"a head of layer {layer} is named twice")
    unknown = sorted(head for head in heads if not 0 <= head < shape.num_kv_heads)
    if unknown:
        raise MigrationError(
            f"layer {layer} has no KV head {unknown[0]}: it has {shape.num_kv_heads}"
        )


def overlap(one: Modules, other: Modules) -> str | None:
    """Modules that two units have in common, for messages; None where there are none."""
    shared = sorted(set(one.layers) & set(other.layers))
    if isinstance(one, HeadSet) and isinstance(other, HeadSet):
        for layer in shared:
            heads = sorted(set(one.heads[layer]) & set(other.heads[layer]))
            if heads:
                return f"head {heads[0]} of layer {layer}"
        return None
    return f"layer {shared[0]}" if shared else None


def check_free(modules: Modules, others: Mapping[str, Modules]) -> None:
    """Refuse modules that another unit holds, remote or on their way.

    Args:
        modules: What is to move.
        others: Every unit that is not wholly at home, by its id.

    Raises:
        MigrationError: They overlap.
    """
    for unit_id, held in others.items():
        shared = overlap(modules, held)
        if shared is not None:
            raise MigrationError(
                f"{shared} belongs to {unit_id} ({held}), which is away or moving: "
                f"return it first, or move {unit_id} as a whole"
            )


def read_modules(given: dict[str, Any]) -> Modules:
    """Modules as a coordinator names them.

    Raises:
        ValidationError: They are malformed.
    """
    if given.get("type") == "heads":
        pairs = msgspec.convert(given.get("heads"), list[tuple[int, tuple[int, ...]]])
        return HeadSet({layer: tuple(sorted(heads)) for layer, heads in pairs})
    return msgspec.convert(given, LayerRange | Context)


def write_modules(modules: Modules) -> dict[str, Any]:
    """The inverse of ``read_modules``."""
    if isinstance(modules, HeadSet):
        heads = [[layer, list(modules.heads[layer])] for layer in modules.layers]
        return {"type": "heads", "heads": heads}
    kind = "layers" if isinstance(modules, LayerRange) else "context"
    return {"type": kind, "start": modules.start, "end": modules.end}


class MovePhase(Enum):
    """Phase of a move.

    Until COMMITTED the source serves and nothing of it has changed, so every phase before it can
    end in ABORTED or FAILED at no cost. A committed move can only be followed by another move.
    One that is committed without COPYING copies everything at a standstill.
    """

    PREPARING = "preparing"
    PREPARED = "prepared"
    COPYING = "copying"
    COPIED = "copied"
    COMMITTED = "committed"
    FREEING = "freeing"
    FREED = "freed"
    ABORTED = "aborted"
    FAILED = "failed"


_ENDS = frozenset({MovePhase.ABORTED, MovePhase.FAILED})

ALLOWED: dict[MovePhase, frozenset[MovePhase]] = {
    MovePhase.PREPARING: frozenset({MovePhase.PREPARED}) | _ENDS,
    MovePhase.PREPARED: frozenset({MovePhase.COPYING, MovePhase.COMMITTED}) | _ENDS,
    MovePhase.COPYING: frozenset({MovePhase.COPIED}) | _ENDS,
    MovePhase.COPIED: frozenset({MovePhase.COPYING, MovePhase.COMMITTED}) | _ENDS,
    MovePhase.COMMITTED: frozenset({MovePhase.FREEING}),
    MovePhase.FREEING: frozenset({MovePhase.FREED, MovePhase.FAILED}),
    MovePhase.FREED: frozenset(),
    MovePhase.ABORTED: frozenset(),
    MovePhase.FAILED: frozenset(),
}

OPEN = frozenset({MovePhase.PREPARING, MovePhase.PREPARED, MovePhase.COPYING, MovePhase.COPIED})
"""Phases in which the source still serves and the move may yet be given up."""


def check_step(move_id: str, before: MovePhase, after: MovePhase) -> None:
    """Refuse a change of phase that is not in the table.

    Raises:
        MigrationError: ``after`` may not follow ``before``.
    """
    if after not in ALLOWED[before]:
        possible = ", ".join(sorted(phase.value for phase in ALLOWED[before])) or "nothing"
        raise MigrationError(
            f"move {move_id} is {before.value} and cannot become {after.value}; "
            f"{possible} may follow"
        )
