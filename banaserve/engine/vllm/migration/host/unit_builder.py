"""Makes a unit in a guest, and its memory ready at home: the work of PREPARE."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from banaserve.engine.vllm.migration.host.block_mover import BlockMover
from banaserve.engine.vllm.migration.host.units import Unit, UnitLocation
from banaserve.engine.vllm.migration.kv.dirty_blocks import DirtyBlockTracker, RemoteBlocks
from banaserve.engine.vllm.migration.kv.host_kv import Freed, HostKv, KvRun
from banaserve.engine.vllm.migration.kv.remote_kv import RemoteKv, StagedRemoteKv
from banaserve.engine.vllm.migration.modules.paged_attention import kernels_of, pages_of
from banaserve.engine.vllm.migration.rpc import messages
from banaserve.engine.vllm.migration.rpc.guest_client import GuestClient
from banaserve.engine.vllm.migration.time_hook import REAL_TIME, TimeHook
from banaserve.engine.vllm.migration.types import Context, LayerRange, Modules
from banaserve.errors import MigrationError
from banaserve.transport.errors import TransportError

BUILD_TIMEOUT_S = 600.0


class UnitBuilder:
    """Called by the threads of moves.

    Args:
        path: Of the model's list of layers.
        kv_shape: How a guest has to lay out its KV.
        attentions: By name.
        poisons: Whether KV that has moved away is overwritten.

    Attributes:
        store: That guests may save layers to; None where there is none.
    """

    def __init__(
        self,
        path: str,
        kv_shape: messages.KvShape,
        kv: HostKv,
        attentions: Mapping[str, Any],
        poisons: bool,
        time_hook: TimeHook = REAL_TIME,
    ) -> None:
        self.store: messages.StorePlace | None = None
        self._poisons = poisons
        self._path = path
        self._kv_shape = kv_shape
        self._kv = kv
        self._attentions = attentions
        self._time_hook = time_hook

    def build(self, unit: Unit, link: GuestClient, written: DirtyBlockTracker) -> UnitLocation:
        """Let a guest build a unit, and open its KV.

        Args:
            written: Blocks that are to be copied soon.

        Raises:
            MigrationError: The guest refuses.
            GuestLostError: It is gone.
        """
        began_s = time.perf_counter()
        request: messages.Request
        if isinstance(unit.modules, LayerRange):
            start, end = unit.modules.start, unit.modules.end
            shape, num_backed = self._kv_shape, self._kv.num_blocks
            request = messages.BuildLayers(
                unit.unit_id, self._path, start, end, shape, num_backed, self.store
            )
        else:
            slices = tuple(self._slice(unit, name) for name in unit.names)
            request = (
                messages.BuildContext(unit.unit_id, slices, self._kv_shape)
                if unit.away is not None
                else messages.BuildHeads(unit.unit_id, slices, self._kv_shape, self._kv.num_blocks)
            )
        built = link.ask(request, messages.Built, BUILD_TIMEOUT_S, may_wait=True)
        residence = self._open(unit, link, built, written)
        self._time_hook.built(unit.modules, time.perf_counter() - began_s)
        return residence

    def _open(
        self, unit: Unit, link: GuestClient, built: messages.Built, written: DirtyBlockTracker
    ) -> UnitLocation:
        """Leaves nothing open where it fails."""
        runs = {name: self._kv.runs(unit.heads(name)) for name in unit.names}
        residence: UnitLocation | None = None
        try:
            kv = self._remote_kv(unit.unit_id, link, built, runs)
            residence = UnitLocation(unit.unit_id, link, kv, built.weight_bytes)
            residence.saves = built.saves
            kv.warm(written.ids())
        except TransportError as error:
            if residence is not None:
                residence.kv.close()
            raise link.give_up(f"its KV is out of reach: {error}") from error
        except OSError as error:
            if residence is not None:
                residence.leave()
            raise MigrationError(f"its KV cannot be mapped here: {error.strerror}") from error
        return residence

    @staticmethod
    def _remote_kv(
        unit_id: str, link: GuestClient, built: messages.Built, runs: Mapping[str, Sequence[KvRun]]
    ) -> RemoteKv:
        if built.landing_bytes:
            return StagedRemoteKv(link, unit_id, built.region, runs, built.landing_bytes)
        return RemoteKv(link.transport, built.region, built.places, runs)

    def _slice(self, unit: Unit, name: str) -> messages.AttentionSlice:
        layer = self._attentions[name]
        impl = getattr(layer.impl, "inner", layer.impl)
        heads = unit.heads(name)
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

    def mover(
        self, unit: Unit, source: UnitLocation | None, target: UnitLocation | None
    ) -> BlockMover:
        """For the copies of a move."""
        return BlockMover(
            unit,
            self._kv,
            source.kv if source else None,
            target.kv if target else None,
            self._time_hook,
        )

    def make_room(self, unit: Unit) -> None:
        """Back a unit's KV at home with memory again, and let it be finite."""
        for name in unit.names:
            self._kv.populate(name, self._kv.num_blocks)
        # Of older blocks whole pages come home, and beside them lie new ones.
        if self._poisons and unit.away is None:
            self.heal(unit)

    def heal(self, unit: Unit) -> None:
        """Overwrite what ``poison`` has left of a unit's KV at home."""
        for name in unit.names:
            self._kv.heal(name, unit.heads(name))

    def poison(self, unit: Unit) -> None:
        """Overwrite a unit's KV at home with NaN, where that is asked for."""
        blocks = range(self._kv.num_blocks) if unit.away is None else unit.away.ids()
        for name in unit.names if self._poisons else ():
            self._kv.poison(name, unit.heads(name), blocks)

    def free(self, unit: Unit) -> list[Freed]:
        """Give the memory of a unit's KV at home back to the system."""
        return [self._free(unit, name) for name in unit.names]

    def _free(self, unit: Unit, name: str) -> Freed:
        if unit.away is None:
            return self._kv.free(name, unit.heads(name))
        with unit.away.holding(unit.away.ids()) as blocks:
            return self._kv.free(name, None, blocks)

    def unit(self, unit_id: str, modules: Modules, names: Mapping[int, str]) -> Unit:
        """Modules that are at home, as a unit; older blocks that are overwritten lose poison.

        Raises:
            MigrationError: Older blocks cannot be read as they are kept.
        """
        if not isinstance(modules, Context):
            return Unit(unit_id, modules, names)
        chosen = [names[layer] for layer in modules.layers]

        def heal(blocks: npt.NDArray[np.int64]) -> None:
            for name in chosen:
                self._kv.heal_blocks(name, blocks)

        first = self._attentions[chosen[0]]
        impl = getattr(first.impl, "inner", first.impl)
        pages = pages_of(first, impl, self._kv.tensors[chosen[0]], kernels_of(first.impl))
        away = RemoteBlocks(self._kv.max_blocks, heal if self._poisons else None)
        return Unit(unit_id, modules, names, away, pages)
