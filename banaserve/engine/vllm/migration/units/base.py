"""Interface of a migration unit, and what units have in common."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, Self

import msgspec

from banaserve.engine.vllm.migration.api import MigrationRequest, Return
from banaserve.engine.vllm.migration.types import ModelGeometry
from banaserve.errors import MigrationError
from banaserve.types import Module

Cell = tuple[int, int]
"""A layer, and a head of it where heads move one by one, else 0."""


class MigrationUnit(Protocol):
    """Part of a model that moves as a whole: a value, which the controller plans with.

    Attributes:
        kind: Name of its kind, in the admin API and between processes.
        has_weights: Whether its layers run elsewhere as a whole, with their weights: the host must
            keep one layer.
        loads_weights: Whether a guest has to load weights for it, for which it stands still.
        is_on_all_ranks: Whether every tensor-parallel rank has a part of it.
    """

    kind: ClassVar[str]
    has_weights: ClassVar[bool]
    loads_weights: ClassVar[bool]
    is_on_all_ranks: ClassVar[bool]

    @property
    def layers(self) -> Sequence[int]:
        """Layers that it is about, ascending."""
        ...

    # ---- planning

    def check(self, shape: ModelGeometry) -> None:
        """Refuse what the model does not have.

        Raises:
            MigrationError: It is empty, or has an unknown layer or head.
        """
        ...

    def cells(self) -> set[Cell]:
        """Its parts one by one: comparable among units of one kind."""
        ...

    def of_cells(self, cells: set[Cell]) -> Sequence[MigrationUnit]:
        """Units of its kind that have these parts together; none for no parts."""
        ...

    def describe_cell(self, cell: Cell) -> str:
        """One of its parts in words."""
        ...

    def covers(self, other: MigrationUnit) -> bool:
        """Whether ``other`` comes home as a whole where this is asked home."""
        ...

    # ---- sizes

    def weight_bytes(self, layer_weight_bytes: int) -> int:
        """Weights that a guest has to load for it."""
        ...

    def kv_pages(self, num_kv_heads: int) -> float:
        """Whole layers' KV that a guest may have to hold, in pages of each of the host's blocks."""
        ...

    def num_pages(self, num_kv_heads: int) -> float:
        """Whole layers' KV that it takes out of the host's pool as long as it is away."""
        ...

    # ---- its forms elsewhere

    def to_wire(self) -> dict[str, Any]:
        """Plain values for JSON, without its kind."""
        ...

    @classmethod
    def from_wire(cls, given: Mapping[str, Any]) -> Self:
        """Inverse of ``to_wire``.

        Raises:
            ValidationError: It is malformed.
        """
        ...

    def move_request(self, source: str, target: str) -> MigrationRequest:
        """Request to the coordinator to move it."""
        ...

    def return_request(self, source: str) -> Return:
        """Request to the coordinator to take it home.

        Raises:
            MigrationError: It cannot be named in one.
        """
        ...

    def as_modules(self) -> list[Module]:
        """The orchestrator's words for it; empty where that knows nothing of its kind."""
        ...

    def modelled(self, own: ModelGeometry, model: ModelGeometry) -> list[Module]:
        """Modules of a modelled ``model`` that it stands for in the model that runs, ``own``."""
        ...

    # ---- on the host

    def check_attention(self, attention: Any, name: str) -> None:
        """Refuse an attention of vLLM's that cannot be moved so.

        Raises:
            MigrationError: With the reason.
        """
        ...


class LayerSpan(msgspec.Struct, frozen=True):
    """What units have in common that are given by layers ``start`` to ``end - 1``."""

    start: int
    end: int

    @property
    def layers(self) -> range:
        return range(self.start, self.end)

    def cells(self) -> set[Cell]:
        return {(layer, 0) for layer in self.layers}

    def of_cells(self, cells: set[Cell]) -> list[Self]:
        """A range for each run of neighbouring layers."""
        ranges: list[tuple[int, int]] = []
        for layer, _ in sorted(cells):
            if ranges and ranges[-1][1] == layer:
                ranges[-1] = (ranges[-1][0], layer + 1)
            else:
                ranges.append((layer, layer + 1))
        return [type(self)(start, end) for start, end in ranges]

    def describe_cell(self, cell: Cell) -> str:
        return f"layer {cell[0]}"

    def to_wire(self) -> dict[str, Any]:
        return {"start": self.start, "end": self.end}

    @classmethod
    def from_wire(cls, given: Mapping[str, Any]) -> Self:
        return msgspec.convert(given, cls)


class LayerNumbers(msgspec.Struct, frozen=True):
    """What units have in common that are given by numbers, of heads say, layer by layer.

    The field that has them is named as the kind is.

    Attributes:
        one: Of what the numbers are.
        in_full: The same in more words.
    """

    kind: ClassVar[str]
    one: ClassVar[str]
    in_full: ClassVar[str]

    @property
    def by_layer(self) -> dict[int, tuple[int, ...]]:
        found: dict[int, tuple[int, ...]] = getattr(self, self.kind)
        return found

    @property
    def layers(self) -> list[int]:
        return sorted(self.by_layer)

    def __str__(self) -> str:
        parts = (f"{layer}/{','.join(map(str, self.by_layer[layer]))}" for layer in self.layers)
        return f"{self.kind} {' '.join(parts)}"

    def check_numbers(self, num_layers: int, count: int) -> None:
        """Refuse layers that are not there, and numbers that are none of a layer's ``count``.

        Raises:
            MigrationError: With the first that is wrong.
        """
        if not self.by_layer:
            raise MigrationError(f"no {self.kind} are named")
        for layer, numbers in self.by_layer.items():
            if not 0 <= layer < num_layers:
                raise MigrationError(f"there is no layer {layer}: the model has {num_layers}")
            if not numbers:
                raise MigrationError(f"no {self.kind} of layer {layer} are named")
            if len(set(numbers)) != len(numbers):
                raise MigrationError(f"one of the {self.kind} of layer {layer} is named twice")
            unknown = sorted(number for number in numbers if not 0 <= number < count)
            if unknown:
                raise MigrationError(
                    f"layer {layer} has no {self.in_full} {unknown[0]}: it has {count}"
                )

    def cells(self) -> set[Cell]:
        return {(layer, number) for layer, some in self.by_layer.items() for number in some}

    def of_cells(self, cells: set[Cell]) -> list[Self]:
        """One set of all of them."""
        numbers: dict[int, tuple[int, ...]] = {}
        for layer, number in sorted(cells):
            numbers[layer] = (*numbers.get(layer, ()), number)
        return [type(self)(numbers)] if numbers else []

    def describe_cell(self, cell: Cell) -> str:
        return f"{self.one} {cell[1]} of layer {cell[0]}"

    def covers(self, other: MigrationUnit) -> bool:
        return other.kind == self.kind and other.cells() <= self.cells()

    def to_wire(self) -> dict[str, Any]:
        return {self.kind: [[layer, list(self.by_layer[layer])] for layer in self.layers]}

    @classmethod
    def from_wire(cls, given: Mapping[str, Any]) -> Self:
        pairs = msgspec.convert(given.get(cls.kind), list[tuple[int, tuple[int, ...]]])
        return cls.of(dict(pairs))

    @classmethod
    def of(cls, numbers: Mapping[int, Sequence[int]]) -> Self:
        """With the numbers of each layer in ascending order."""
        return cls({layer: tuple(sorted(some)) for layer, some in numbers.items()})


def overlap(one: MigrationUnit, other: MigrationUnit) -> str | None:
    """The first part that two units have in common, in words; None where they have none."""
    if one.kind == other.kind:
        cells = one.cells() & other.cells()
        return one.describe_cell(min(cells)) if cells else None
    shared = set(one.layers) & set(other.layers)
    return f"layer {min(shared)}" if shared else None


def check_free(modules: MigrationUnit, others: Mapping[str, MigrationUnit]) -> None:
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


def layers_left(modules: Iterable[MigrationUnit], num_layers: int) -> set[int]:
    """Layers whose weights none of ``modules`` takes along."""
    gone = {layer for one in modules if one.has_weights for layer in one.layers}
    return set(range(num_layers)) - gone
