"""Interface of a migration unit, and base classes of units."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self

import msgspec

from banaserve.base.errors import MigrationError
from banaserve.base.types import Module
from banaserve.contracts.migration_api import MigrationRequest, Return
from banaserve.contracts.move_phase import ModelGeometry
from banaserve.migration.kv.dirty_blocks import spans

Cell = tuple[int, int]
"""A layer with the number of a head or expert in it; 0 for units that are given by layers."""


class MigrationUnit(msgspec.Struct, frozen=True):
    """Part of a model that moves as a whole: a value, which the controller plans with.

    Attributes:
        kind: Name of the unit's kind, in the admin API and between processes.
        has_weights: True if whole layers move with their weights; the host must keep one layer.
        loads_weights: True if a guest has to load weights for the unit, which stalls the guest.
        is_on_all_ranks: True if every tensor-parallel rank has a part of the unit.
    """

    kind: ClassVar[str]
    has_weights: ClassVar[bool] = False
    loads_weights: ClassVar[bool] = False
    is_on_all_ranks: ClassVar[bool] = True

    @property
    def layers(self) -> Sequence[int]:
        """Return the layers of the unit, ascending."""
        raise NotImplementedError

    # ---- planning

    def check(self, shape: ModelGeometry) -> None:
        """Check that the model has all parts of the unit.

        Raises:
            MigrationError: The unit is empty, or has an unknown layer, head or expert.
        """
        raise NotImplementedError

    def cells(self) -> set[Cell]:
        """Return the single parts of the unit, comparable among units of one kind."""
        raise NotImplementedError

    def of_cells(self, cells: set[Cell]) -> Sequence[Self]:
        """Return units of this kind that together have these parts; none for no parts."""
        raise NotImplementedError

    def describe_cell(self, cell: Cell) -> str:
        """Return a description of one part of the unit in words."""
        raise NotImplementedError

    def covers(self, other: MigrationUnit) -> bool:
        """Return whether a request to take this unit home takes all of ``other`` home."""
        return other.kind == self.kind and other.cells() <= self.cells()

    # ---- sizes

    def weight_bytes(self, layer_weight_bytes: int) -> int:
        """Return the bytes of weights that a guest has to load for the unit, whole layers."""
        return len(self.layers) * layer_weight_bytes if self.loads_weights else 0

    def kv_pages(self, num_kv_heads: int) -> float:
        """Return the KV that a guest may have to hold, in whole layers' pages for each block."""
        return float(len(self.layers))

    def num_pages(self, num_kv_heads: int) -> float:
        """Return the KV that the host's pool lacks while the unit is away, as in ``kv_pages``."""
        return self.kv_pages(num_kv_heads)

    # ---- its forms in messages, requests and policies

    def to_wire(self) -> dict[str, Any]:
        """Return the unit as plain values for JSON, without its kind."""
        raise NotImplementedError

    def move_request(self, source: str, target: str) -> MigrationRequest:
        """Return the request to the coordinator that moves the unit."""
        raise NotImplementedError

    def return_request(self, source: str) -> Return:
        """Return the request to the coordinator that takes the unit home."""
        raise NotImplementedError

    def as_modules(self) -> list[Module]:
        """Return the unit as the orchestrator's modules; empty if only an operator moves it."""
        return []

    def modelled(self, own: ModelGeometry, model: ModelGeometry) -> list[Module]:
        """Return modules of the modelled ``model`` that the unit of the real ``own`` represents.

        Empty if the model has no such modules, or their cost depends on the requests being served.
        """
        return []

    # ---- on the host

    def check_attention(self, attention: Any, name: str) -> None:
        """Refuse, by a ``MigrationError``, an attention that this kind of unit cannot move."""


class LayerSpan(MigrationUnit, frozen=True):
    """Base of units that are given by layers ``start`` to ``end - 1``."""

    start: int
    end: int

    @property
    def layers(self) -> range:
        return range(self.start, self.end)

    def cells(self) -> set[Cell]:
        return {(layer, 0) for layer in self.layers}

    def of_cells(self, cells: set[Cell]) -> list[Self]:
        """Return one range for each run of neighbouring layers."""
        runs = spans([layer for layer, _ in cells])
        return [type(self)(first, first + count) for first, count in runs]

    def describe_cell(self, cell: Cell) -> str:
        return f"layer {cell[0]}"

    def to_wire(self) -> dict[str, Any]:
        return {"start": self.start, "end": self.end}

    def return_request(self, source: str) -> Return:
        """Return a request that names the layers: all of their modules that are away come home."""
        return Return(source, layers=(self.start, self.end))


class LayerNumbers(MigrationUnit, frozen=True):
    """Base of units that are given by numbers in each layer, such as the numbers of heads.

    The field with the numbers has the name of the kind.

    Attributes:
        one: Noun for the numbered part, such as "head".
        in_full: Full noun for the numbered part, such as "KV head".
    """

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
        """Refuse unknown or empty layers, and numbers that are repeated or not below ``count``.

        Raises:
            MigrationError: A layer or number is wrong; the message states the first one.
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
        """Return one unit with all cells; none for no cells."""
        numbers: dict[int, tuple[int, ...]] = {}
        for layer, number in sorted(cells):
            numbers[layer] = (*numbers.get(layer, ()), number)
        return [type(self)(numbers)] if numbers else []

    def describe_cell(self, cell: Cell) -> str:
        return f"{self.one} {cell[1]} of layer {cell[0]}"

    def to_wire(self) -> dict[str, Any]:
        return {self.kind: [[layer, list(self.by_layer[layer])] for layer in self.layers]}

    @classmethod
    def of(cls, numbers: Mapping[int, Sequence[int]]) -> Self:
        """Return a unit with the numbers of each layer in ascending order."""
        return cls({layer: tuple(sorted(some)) for layer, some in numbers.items()})


def overlap(one: MigrationUnit, other: MigrationUnit) -> str | None:
    """Return the first part that two units have in common, in words; None if there is none."""
    if one.kind == other.kind:
        cells = one.cells() & other.cells()
        return one.describe_cell(min(cells)) if cells else None
    shared = set(one.layers) & set(other.layers)
    return f"layer {min(shared)}" if shared else None


def check_free(modules: MigrationUnit, others: Mapping[str, MigrationUnit]) -> None:
    """Refuse modules that belong to another unit, which is away or moving.

    Args:
        others: Every unit that is not wholly at home, by its id.

    Raises:
        MigrationError: The modules overlap with another unit.
    """
    for unit_id, held in others.items():
        shared = overlap(modules, held)
        if shared is not None:
            raise MigrationError(
                f"{shared} belongs to {unit_id} ({held}), which is away or moving: "
                f"return it first, or move {unit_id} as a whole"
            )


def layers_left(modules: Iterable[MigrationUnit], num_layers: int) -> set[int]:
    """Return the layers whose weights remain on the host when ``modules`` move."""
    gone = {layer for one in modules if one.has_weights for layer in one.layers}
    return set(range(num_layers)) - gone
