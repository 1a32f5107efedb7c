"""Units as their host sees them: what each kind does on an engine whose parts move."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from banaserve.engine.vllm.compat.config import VllmConfig
from banaserve.engine.vllm.migration.kv.dirty_blocks import DirtyBlockTracker, RemoteBlocks
from banaserve.engine.vllm.migration.kv.host_kv import Freed, HostKv
from banaserve.engine.vllm.migration.kv.remote_kv import RemoteKv, StagedRemoteKv
from banaserve.engine.vllm.migration.kv.step_context import StepContext
from banaserve.engine.vllm.migration.modules.compiled_model import CompiledModel
from banaserve.engine.vllm.migration.modules.expert_split import SplitExperts
from banaserve.engine.vllm.migration.ranks import Ranks
from banaserve.engine.vllm.migration.rpc import messages
from banaserve.engine.vllm.migration.rpc.guest_client import GuestClient
from banaserve.engine.vllm.migration.units.base import MigrationUnit
from banaserve.errors import GuestLostError, MigrationError


class UnitLocation:
    """One unit in one guest.

    Attributes:
        link: To the guest.
        kv: The unit's KV there.
        epoch: In which it was put to work; None until then.
        weight_bytes: That the guest has loaded for it.
        saves: Whether the guest can save it to the store.
    """

    saves = False

    def __init__(self, unit_id: str, link: GuestClient, kv: RemoteKv, weight_bytes: int) -> None:
        self.unit_id = unit_id
        self.link = link
        self.kv = kv
        self.weight_bytes = weight_bytes
        self.epoch: int | None = None

    def activate(self, epoch: int) -> None:
        """Put it to work: from here on it takes messages and copies of ``epoch`` only."""
        self.link.ask(messages.Activate(self.unit_id, epoch), messages.StepsDone)
        self.kv.epoch = epoch
        self.epoch = epoch

    def leave(self) -> None:
        """Let the guest forget the unit; a guest that is lost has forgotten already."""
        self.kv.close()
        try:
            self.link.ask(messages.ReleaseUnit(self.unit_id), messages.StepsDone)
        except GuestLostError:
            return
        except MigrationError as refused:
            self.link.give_up(str(refused))

    @property
    def has_landed(self) -> bool:
        """Whether the guest has to be asked for each copy of its KV."""
        return isinstance(self.kv, StagedRemoteKv)

    @property
    def working_epoch(self) -> int:
        assert self.epoch is not None
        return self.epoch


@dataclass
class HostEngine:
    """Parts of an engine that its units use.

    Attributes:
        path: Of the model's list of layers.
        layers: That list.
        attentions: By name, in layer order.
        kv_shape: How a guest has to lay out its KV.
        on_lost: Called with a guest that is lost in the middle of a step.
        poisons: Whether KV that has moved away is overwritten with NaN.
        store: That guests may save blocks to; None where there is none.
        experts: Of the layers that have any, by layer.
        compiled: The model, where it may be compiled.
        ranks: Of the engine, which run a part of each layer.
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
    compiled: CompiledModel | None = None
    ranks: Ranks = field(default_factory=Ranks)

    def names(self, layers: Iterable[int]) -> list[str]:
        """Of the attentions of these layers."""
        every = list(self.kv.tensors)
        return [every[layer] for layer in layers]


class HostUnit(ABC):
    """A unit with one place at a time; a kind overrides where it is not about whole pages.

    Attributes:
        unit_id: Named by the coordinator through the move that took it away first.
        modules: What it is.
        names: Of its attentions, in layer order; none where no KV goes with it.
        residence: Where it runs; None at home.
        blocks_come_home: Whether single blocks come home by being written while it is away.
        microbatch_blocker: Why steps cannot be cut while it is away; empty where they can.
        replaces_modules: Whether something stands in the place of modules that graphs would hold.
    """

    blocks_come_home = False
    microbatch_blocker = ""
    replaces_modules = False

    def __init__(self, unit_id: str, modules: MigrationUnit, engine: HostEngine) -> None:
        self.unit_id = unit_id
        self.modules = modules
        self.names = engine.names(modules.layers)
        self.residence: UnitLocation | None = None
        self._engine = engine

    # ---- what each kind says

    @abstractmethod
    def build_request(self) -> messages.Build:
        """Message that lets a guest build it."""

    @abstractmethod
    def install(self) -> None:
        """Let the model run it at ``residence``, or at home where that is None.

        Between two steps, or when its guest is lost in one.
        """

    def heads(self, name: str) -> tuple[int, ...] | None:
        """Which KV heads of an attention belong to it, ascending; None: all, with the layer."""
        return None

    def left_home(self, dirty_blocks: DirtyBlockTracker) -> None:
        """Take note of the blocks that have been copied: it leaves home with this commit."""
        return

    # ---- its blocks

    def moved_heads(self, name: str) -> Sequence[int]:
        """KV heads of which every block is where the unit is."""
        heads = self.heads(name)
        return range(self._engine.kv.num_heads) if heads is None else heads

    @property
    def single_blocks(self) -> RemoteBlocks | None:
        """Which blocks are where the unit is; None: all of ``moved_heads``."""
        return None

    def holding(self, blocks: Sequence[int]) -> contextlib.AbstractContextManager[Sequence[int]]:
        """Those of ``blocks`` that are where the unit is; none comes home inside of it."""
        return contextlib.nullcontext(blocks)

    def make_room(self) -> None:
        """Back its KV at home with memory again, and let it be finite."""
        for name in self.names:
            self._engine.kv.populate(name, self._engine.kv.num_blocks)
        self.heal()

    def heal(self) -> None:
        """Overwrite what poison has left of its KV at home, where that is used."""
        for name in self.names if self._engine.poisons else ():
            self._engine.kv.heal(name, self.heads(name))

    def poison(self) -> None:
        """Overwrite its KV at home with NaN, where that is asked for."""
        for name in self.names if self._engine.poisons else ():
            self._engine.kv.poison(name, self.heads(name), self._blocks_away())

    def _blocks_away(self) -> Iterable[int]:
        return range(self._engine.kv.num_blocks)

    def free(self) -> list[Freed]:
        """Give the memory of its KV at home back to the system."""
        return [self._engine.kv.free(name, self.heads(name)) for name in self.names]

    def attention_slices(self) -> tuple[messages.AttentionSlice, ...]:
        """Its heads of each layer, as a guest has to build their attention."""
        return tuple(self._slice(name) for name in self.names)

    def _slice(self, name: str) -> messages.AttentionSlice:
        layer = self._engine.attentions[name]
        impl = getattr(layer.impl, "inner", layer.impl)
        heads = self.heads(name)
        num_kv_heads = layer.num_kv_heads if heads is None else len(heads)
        group = layer.num_heads // layer.num_kv_heads
        window = impl.sliding_window
        return messages.AttentionSlice(
            name=name,
            num_heads=num_kv_heads * group,
            num_kv_heads=num_kv_heads,
            head_size=layer.head_size,
            scale=impl.scale,
            sliding_window=None if window is None or window < 0 else window,
            logits_soft_cap=impl.logits_soft_cap or None,
        )
