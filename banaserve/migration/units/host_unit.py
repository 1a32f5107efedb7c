"""Units as their host sees them: the work of each kind on the engine whose parts move."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from banaserve.base.errors import GuestLostError
from banaserve.engine.compat.config import VllmConfig
from banaserve.engine.compat.runner.hooks import window_tokens
from banaserve.migration.kv.dirty_blocks import DirtyBlockTracker, RemoteBlocks
from banaserve.migration.kv.host_kv import Freed, HostKv
from banaserve.migration.kv.remote_kv import UnitLocation
from banaserve.migration.kv.step_context import StepContext
from banaserve.migration.modules.context_split import ContextAttention
from banaserve.migration.modules.expert_split import SplitExperts
from banaserve.migration.modules.head_split import SplitHeads
from banaserve.migration.modules.step_graphs import CompiledModel, StepGraphs
from banaserve.migration.ranks import Ranks
from banaserve.migration.rpc import messages
from banaserve.migration.rpc.guest_client import GuestClient
from banaserve.migration.units.base import MigrationUnit


@dataclass
class HostEngine:
    """Parts of an engine that its units use.

    Attributes:
        kv_shape: Shape and layout that a guest has to give its KV.
        on_lost: Called with a guest that is lost in the middle of a step.
        poisons: True if KV that has moved away is overwritten with NaN.
        experts: Routed experts by layer, for the layers that have experts.
        split_heads: Attentions that have been split by heads, by name.
        split_contexts: Attentions whose sequences have been split, by name.
    """

    config: VllmConfig
    path: str
    layers: nn.ModuleList
    attentions: Mapping[str, Any]
    kv: HostKv
    kv_shape: messages.KvShape
    step_context: StepContext
    on_lost: Callable[[GuestClient, GuestLostError], None]
    poisons: bool = False
    store: messages.StorePlace | None = None
    experts: Mapping[int, SplitExperts] = field(default_factory=dict)
    split_heads: dict[str, SplitHeads] = field(default_factory=dict)
    split_contexts: dict[str, ContextAttention] = field(default_factory=dict)
    compiled: CompiledModel | None = None
    graphs: StepGraphs | None = None
    ranks: Ranks = field(default_factory=Ranks)

    def names(self, layers: Iterable[int]) -> list[str]:
        """Return the names of the attentions of these layers."""
        every = list(self.kv.tensors)
        return [every[layer] for layer in layers]


class HostUnit(ABC):
    """A unit, which is in one place at a time; a kind overrides what differs for parts of pages.

    Attributes:
        unit_id: Id of the unit: the id of the move that first took the unit away.
        names: Names of the unit's attentions, in layer order; empty if no KV moves with the unit.
        residence: Location in the guest that runs the unit; None at home.
        microbatch_blocker: Reason why steps cannot be cut while the unit is away; empty if they
            can.
        replaces_modules: True if the unit replaces modules that compiled graphs would hold.
        sends_slices: True if the guest builds single attentions, not layers.
        is_backed: True if the guest's KV gets its memory before copies touch it.
    """

    microbatch_blocker = ""
    replaces_modules = False
    sends_slices = False
    is_backed = True

    def __init__(self, unit_id: str, modules: MigrationUnit, engine: HostEngine) -> None:
        self.unit_id = unit_id
        self.modules = modules
        self.names = engine.names(modules.layers)
        self.residence: UnitLocation | None = None
        self._engine = engine

    # ---- its kind

    @abstractmethod
    def install(self) -> None:
        """Let the model run the unit at ``residence``, or at home if ``residence`` is None.

        Called between two steps, or when the unit's guest is lost in a step.
        """

    def build_request(self) -> messages.Build[MigrationUnit]:
        """Return the message that lets a guest build the unit."""
        engine = self._engine
        slices = tuple(self._slice(name) for name in self.names) if self.sends_slices else ()
        num_backed = engine.kv.num_blocks if self.is_backed else 0
        fields = self.unit_id, engine.kv_shape, num_backed, self.modules, engine.path
        return messages.Build(*fields, slices, engine.store)

    def heads(self, name: str) -> tuple[int, ...] | None:
        """Return the unit's KV heads of an attention, ascending; None: the whole layer."""
        return None

    def left_home(self, dirty_blocks: DirtyBlockTracker) -> None:
        """Record the blocks that have been copied; the unit leaves home with this commit."""
        return

    # ---- its blocks

    def moved_heads(self, name: str) -> Sequence[int]:
        """Return the KV heads of which every block is where the unit is."""
        if self.single_blocks is not None:
            return ()
        heads = self.heads(name)
        return range(self._engine.kv.num_heads) if heads is None else heads

    @property
    def single_blocks(self) -> RemoteBlocks | None:
        """Return the set of blocks that are where the unit is; None: all of ``moved_heads``.

        A write to one of them brings it home while the unit is away.
        """
        return None

    def holding(self, blocks: Sequence[int]) -> contextlib.AbstractContextManager[Sequence[int]]:
        """Return a context with those ``blocks`` that are at the unit; none comes home within."""
        single = self.single_blocks
        return contextlib.nullcontext(blocks) if single is None else single.holding(blocks)

    def make_room(self) -> None:
        """Back the unit's KV at home with memory again, and remove its NaN poison.

        Single blocks are not healed: whole blocks come home, beside blocks in use.
        """
        for name in self.names:
            self._engine.kv.populate(name, self._engine.kv.num_blocks)
        if self.single_blocks is None:
            self.heal()

    def heal(self) -> None:
        """Overwrite the unit's NaN poison at home with zeros, if the engine uses poison."""
        for name in self.names if self._engine.poisons else ():
            self._engine.kv.heal(name, self.heads(name))

    def poison(self) -> None:
        """Overwrite the unit's KV at home with NaN, if the engine uses poison."""
        for name in self.names if self._engine.poisons else ():
            single, kv = self.single_blocks, self._engine.kv
            away = range(kv.num_blocks) if single is None else single.ids()
            kv.poison(name, self.heads(name), away)

    def free(self) -> list[Freed]:
        """Give the memory of the unit's KV at home back to the system."""
        return [self._free(name) for name in self.names]

    def _free(self, name: str) -> Freed:
        single, kv = self.single_blocks, self._engine.kv
        if single is None:
            return kv.free(name, self.heads(name))
        with single.holding(single.ids()) as blocks:
            return kv.free(name, self.heads(name), blocks)

    def _slice(self, name: str) -> messages.AttentionSlice:
        """Return the unit's heads of a layer, as a guest has to build their attention."""
        layer = self._engine.attentions[name]
        impl = getattr(layer.impl, "inner", layer.impl)
        heads = self.heads(name)
        num_kv_heads = layer.num_kv_heads if heads is None else len(heads)
        group = layer.num_heads // layer.num_kv_heads
        return messages.AttentionSlice(
            name=name,
            num_heads=num_kv_heads * group,
            num_kv_heads=num_kv_heads,
            head_size=layer.head_size,
            scale=impl.scale,
            sliding_window=window_tokens(impl),
            logits_soft_cap=impl.logits_soft_cap or None,
        )
