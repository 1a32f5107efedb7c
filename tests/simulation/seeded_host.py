"""The migration side of an engine of a virtual machine: real host, worker and pool's contract."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from vllm.v1.attention.backend import CommonAttentionMetadata

from banaserve.base.errors import MigrationError
from banaserve.contracts.rpc.engine_api import CoreApi, PoolResize, PoolStatus
from banaserve.contracts.rpc.typed_rpc import implements
from banaserve.engine.compat.config import CUDAGraphMode
from banaserve.engine.compat.runner import hooks as runner_hooks
from banaserve.engine.connector.worker_side.block_copy import EndedCopy
from banaserve.engine.migration_settings import MigrationSettings
from banaserve.migration.host.host import MigrationHost
from banaserve.migration.host.worker_rpc import MigrationMethods
from banaserve.migration.kv.host_kv import HostKv, KvRun
from banaserve.migration.kv.store_copier import StoreCopier
from banaserve.migration.modules.layer_proxy import RangeProxy
from banaserve.transport.memory import Memory
from seeded_modules import (
    BLOCK,
    NAMES,
    NUM_HEADS,
    NUM_LAYERS,
    Attention,
    ModelLayer,
    SplitDouble,
    kept_of,
    result_of,
)

NUM_BLOCKS = 64
SETTINGS = MigrationSettings(kv_growth=1.5, stall_s=0.5, overlap=1, poison=True)


class _Builder:
    """Of attention metadata: it is passed on as it is."""

    def build(self, _: int, common: CommonAttentionMetadata) -> CommonAttentionMetadata:
        return common


class Runner:
    """A model runner, as much of one as a host and its recovery ask for."""

    def __init__(self, weights: int) -> None:
        self.weights = weights
        self.model = nn.Module()
        layers = [ModelLayer(number, weights, self) for number in range(NUM_LAYERS)]
        self.model.layers = nn.ModuleList(layers)
        self.builder = _Builder()
        spec = SimpleNamespace(block_size=BLOCK)
        group = SimpleNamespace(kv_cache_spec=spec, get_metadata_builder=lambda _: self.builder)
        self.attn_groups = [[group]]
        self.cache_config = SimpleNamespace(kv_cache_layout="NHD")
        context = {name: Attention() for name in NAMES}
        kinds = ("is_encoder_decoder", "is_mm_prefix_lm", "uses_mrope", "use_mla")
        model = SimpleNamespace(**dict.fromkeys(kinds, False))
        self.vllm_config = SimpleNamespace(
            use_v2_model_runner=False,
            compilation_config=SimpleNamespace(
                static_forward_context=context, cudagraph_mode=CUDAGraphMode.NONE
            ),
            model_config=model,
            parallel_config=SimpleNamespace(tensor_parallel_size=1),
            kv_transfer_config=None,
        )
        self.input_batch = SimpleNamespace(generators={})
        self.num_prompt_logprobs: dict[str, int] = {}
        kv_caches = {
            name: torch.zeros(NUM_BLOCKS, NUM_HEADS, BLOCK, dtype=torch.float32) for name in NAMES
        }
        self.host: Any = MigrationHost(self, SETTINGS, HostKv(kv_caches, SETTINGS.kv_growth))
        self.host.engine.split_heads = {name: SplitDouble() for name in NAMES}
        runner_hooks.set_host(self, self.host)
        self._results: dict[str, float] = {}

    def get_model(self) -> nn.Module:
        return self.model

    def execute_model(self, scheduled: Any) -> None:
        """A forward pass, of which the results at each request's last token are kept."""
        common = self.builder.build(0, scheduled.common)
        hidden = torch.stack([scheduled.tokens, torch.zeros_like(scheduled.tokens)], dim=1)
        for layer in self.model.layers:
            hidden = layer(hidden_states=hidden)
        ends = common.query_start_loc_cpu[1:] - 1
        self._results = dict(zip(scheduled.names, hidden[ends.long(), 1].tolist(), strict=True))

    def sample_tokens(self) -> Any:
        return SimpleNamespace(results=self._results)


class Worker(MigrationMethods):
    """See ``engine.vllm.worker``."""

    def __init__(self, runner: Runner) -> None:
        self.model_runner = runner


class BlockPool:
    """Blocks of the requests of an engine, in a pool that changes; see ``CoreApi``."""

    def __init__(self) -> None:
        self.num_blocks = NUM_BLOCKS
        self.by_request: dict[str, list[int]] = {}
        self._below = NUM_BLOCKS

    @property
    def used(self) -> set[int]:
        return {block for blocks in self.by_request.values() for block in blocks}

    def give(self, name: str, num_tokens: int) -> bool:
        """Give a request all blocks that it can need; False where they are not free."""
        free = sorted(set(range(self._below)) - self.used)
        count = -(-num_tokens // BLOCK)
        if len(free) < count:
            return False
        self.by_request[name] = free[-count:]
        return True

    def take(self, name: str) -> None:
        self.by_request.pop(name, None)

    def info(self) -> PoolStatus:
        used = len(self.used)
        return PoolStatus(self.num_blocks, self.num_blocks - used, len(self.by_request), 0, 0)

    def resize(self, num_blocks: int, hold: bool) -> PoolResize:
        if num_blocks < 2:
            raise MigrationError("a pool has at least two blocks")
        busy = sum(block >= num_blocks for block in self.used)
        if not busy:
            self.num_blocks = num_blocks
        self._below = num_blocks if busy and hold else self.num_blocks
        return PoolResize(self.info(), busy)


class _Utilities:
    """What the engine core answers."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    @implements(CoreApi.banaserve_pool_info)
    def banaserve_pool_info(self) -> PoolStatus:
        return self._pool.info()

    @implements(CoreApi.banaserve_resize_pool)
    def banaserve_resize_pool(self, num_blocks: int, hold: bool = False) -> PoolResize:
        return self._pool.resize(num_blocks, hold)


class _Local:
    """Copies of blocks that are at home; see ``BlockCopier``."""

    is_synchronous = True

    def __init__(self, kv: HostKv) -> None:
        self._kv = kv

    def load(self, layer: int, view: Any, blocks: Any, slots: Any, after: Any) -> EndedCopy:
        return self._copy(layer, view, blocks, slots, saves=False)

    def save(self, layer: int, view: Any, blocks: Any, slots: Any, after: Any) -> EndedCopy:
        return self._copy(layer, view, blocks, slots, saves=True)

    def _copy(self, layer: int, view: Any, blocks: Any, slots: Any, *, saves: bool) -> EndedCopy:
        page_bytes = self._kv.page_bytes
        pool = Memory(view.base_address, view.memory.size, True, view)
        offsets = np.asarray(slots, np.int64) * view.slot_bytes + layer * page_bytes
        run = KvRun(0, page_bytes)
        self._kv.copy_run(NAMES[layer], run, blocks, pool, offsets, saves=saves)
        return EndedCopy(0.0)


class _Slots:
    """Memory for blocks on their way from or to the store; see ``PoolView``."""

    def __init__(self, num_slots: int, page_bytes: int) -> None:
        self.slot_bytes = NUM_LAYERS * page_bytes
        self.memory = np.zeros(max(1, num_slots) * self.slot_bytes, np.uint8)
        self.base_address = self.memory.ctypes.data
        self.fingerprint = SimpleNamespace(offset_bytes=lambda layer: layer * page_bytes)

    def values(self) -> Any:
        """``[slots, layers, heads, BLOCK]``."""
        return self.memory.view(np.float32).reshape(-1, NUM_LAYERS, NUM_HEADS, BLOCK)


class HostSide:
    """Everything of an engine that has to do with modules elsewhere.

    Attributes:
        life: Of all KV of the engine.
    """

    def __init__(self, weights: int) -> None:
        self.runner = Runner(weights)
        self.host = self.runner.host
        self.pool = BlockPool()
        self.life = 0
        self._worker, self._utilities = Worker(self.runner), _Utilities(self.pool)
        self._has_failed_copy = False
        local: Any = _Local(self.host.kv)
        self._copier = StoreCopier(
            local,
            NAMES,
            self.host.kv,
            self.host.step_context.dirty_blocks,
            self.host.placement.where_is,
            self.host.placement.older_blocks,
            0,
            self._copy_failed,
        )

    def _copy_failed(self, _: Exception) -> None:
        self._has_failed_copy = True

    def answer(self, method: str, args: Sequence[Any]) -> Any:
        """A call of the coordinator, between two steps."""
        of = self._worker if hasattr(self._worker, method) else self._utilities
        reply = getattr(of, method)(*args)
        self.check()
        return reply

    # ---- a step

    def run(
        self,
        batch: Sequence[tuple[str, Sequence[int], int]],
        loads: Mapping[int, Sequence[int]],
        saves: Mapping[int, Sequence[int]],
    ) -> tuple[set[str], bool]:
        """Fetch, compute and read what is to be saved.

        Args:
            batch: Requests, their tokens, and how many of them were computed before.
            loads: Tokens of blocks that are fetched, and of those before them, by block.
            saves: The same of blocks that are saved.

        Returns:
            Requests whose numbers are those that one engine computes; whether the step was lost,
            so that none of it counts and all requests start over.
        """
        self.check()
        self._has_failed_copy = False
        if loads:
            self._copy(loads, saves=False)
        output = None
        if batch:
            output = self._forward(batch)
        lost = runner_hooks.lost_life_of(output) if output is not None else None
        if lost is not None and lost >= self.life:
            self.life = lost + 1
            return set(), True
        if saves and not self._has_failed_copy:
            self._check_saves(saves)
        self.check()
        if output is None:
            return set(), False
        weights = self.runner.weights
        return {
            name for name, tokens, _ in batch if output.results[name] == result_of(tokens, weights)
        }, False

    @property
    def may_save(self) -> bool:
        """Whether what the last step has computed may go to the store."""
        return not self._has_failed_copy

    def _forward(self, batch: Sequence[tuple[str, Sequence[int], int]]) -> Any:
        new = [tokens[num:] for _, tokens, num in batch]
        starts = torch.tensor(np.cumsum([0, *map(len, new)]), dtype=torch.int32)
        lengths = [len(tokens) for _, tokens, _ in batch]
        tables = [self.pool.by_request[name] for name, _, _ in batch]
        width = max(map(len, tables))
        slots = [
            table[at // BLOCK] * BLOCK + at % BLOCK
            for table, (_, tokens, num) in zip(tables, batch, strict=True)
            for at in range(num, len(tokens))
        ]
        common = CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            num_reqs=len(batch),
            num_actual_tokens=len(slots),
            max_query_len=max(map(len, new)),
            max_seq_len=max(lengths),
            block_table_tensor=torch.tensor(
                [table + [0] * (width - len(table)) for table in tables], dtype=torch.int32
            ),
            slot_mapping=torch.tensor(slots),
        )
        tokens = torch.tensor([token for part in new for token in part], dtype=torch.float64)
        names = [name for name, _, _ in batch]
        scheduled = SimpleNamespace(common=common, tokens=tokens, names=names)
        runner_hooks.set_kv_life(scheduled, self.life)
        self.runner.execute_model(scheduled)
        return self.runner.sample_tokens()

    def _expected(self, blocks: Mapping[int, Sequence[int]]) -> Any:
        """What every layer keeps of these blocks' tokens; NaN where a block is not full."""
        tokens = np.full((len(blocks), BLOCK), np.nan, np.float32)
        for row, of in zip(tokens, blocks.values(), strict=True):
            row[: len(of)] = of
        weights = self.runner.weights
        kept = np.empty((len(blocks), NUM_LAYERS, NUM_HEADS, BLOCK), np.float32)
        for layer in range(NUM_LAYERS):
            for head in range(NUM_HEADS):
                kept[:, layer, head] = kept_of(tokens, layer, head, weights)
        return kept

    def _copy(self, blocks: Mapping[int, Sequence[int]], *, saves: bool) -> _Slots:
        slots: Any = _Slots(len(blocks), self.host.kv.page_bytes)
        if not saves:
            slots.values()[:] = np.nan_to_num(self._expected(blocks))
        act = self._copier.save if saves else self._copier.load
        for layer in range(NUM_LAYERS):
            act(layer, slots, list(blocks), range(len(blocks)), None)
        return slots

    def _check_saves(self, blocks: Mapping[int, Sequence[int]]) -> None:
        values, wanted = self._copy(blocks, saves=True).values(), self._expected(blocks)
        if self._has_failed_copy:
            return
        is_right = (values == wanted) | np.isnan(wanted)
        assert is_right.all(), f"wrong KV of blocks {list(blocks)} goes to the store"

    # ---- what must hold

    def check(self) -> None:
        """No module is in two places, and the model's proxies are those of what is away."""
        cells: set[tuple[int, int]] = set()
        gone: set[int] = set()
        for unit in self.host.placement:
            found = unit.modules.cells()
            if unit.modules.has_weights:
                gone |= set(unit.modules.layers)
                found = {(layer, head) for layer, _ in found for head in range(NUM_HEADS)}
            assert not cells & found, f"{unit.modules} is in two places"
            cells |= found
            assert unit.residence is not None
        at_home = {
            layer
            for layer, module in enumerate(self.runner.model.layers)
            if isinstance(module, ModelLayer)
        }
        assert at_home == set(range(NUM_LAYERS)) - gone, f"layers {gone} are away, not the others"
        proxies = {id(one.span) for one in self.runner.model.layers if isinstance(one, RangeProxy)}
        units = [one for one in self.host.placement if one.modules.has_weights]
        assert len(proxies) == len(units)
