"""KV cache of an engine, the connector's worker, and the hooks that vLLM would call."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import msgspec
import torch

from banaserve.engine.connector.metadata import BlockCopy, StepPlan, StepResult
from banaserve.engine.connector.worker_side.worker import RankShare, StoreConnectorWorker
from banaserve.kvstore.client.client import StoreClient
from banaserve.kvstore.fingerprint import Fingerprint
from forked import Forked
from store_process import fork_store
from waiting import DEADLINE_S

LAYERS, BLOCKS, PAGE_BYTES = 3, 6, 4096
FINGERPRINT = Fingerprint(
    model="m",
    dtype="float32",
    block_size_tokens=16,
    num_layers=LAYERS,
    num_kv_heads=2,
    head_size=8,
    layout="LBHNC",
    page_bytes=PAGE_BYTES,
)
KEYS = [bytes([number]) * 32 for number in range(BLOCKS)]
NAMES = [f"layer.{i}" for i in range(LAYERS)]


class LayeredEngine:
    """An engine's KV cache and the hooks that vLLM would call, in its order."""

    def __init__(self, client: StoreClient, fill: float, worker: StoreConnectorWorker) -> None:
        self.client = client
        shape = (BLOCKS, PAGE_BYTES // 4)
        self.caches = {name: torch.full(shape, fill) for name in NAMES}
        self.worker = worker
        self.worker.register(NAMES, list(self.caches.values()), PAGE_BYTES)
        self.seen: dict[str, torch.Tensor] = {}
        self._steps = 0

    def step(
        self,
        *,
        loads: list[BlockCopy] | None = None,
        early_loads: list[BlockCopy] | None = None,
        saves: list[BlockCopy] | None = None,
        states: list[BlockCopy] | None = None,
        compute: Callable[[str, torch.Tensor], None] = lambda name, cache: None,
        num_layers: int = LAYERS,
        settled: int = 0,
    ) -> StepResult:
        """Run a step; ``seen`` keeps what each layer's attention would read."""
        self._steps += 1
        plan = StepPlan(
            self._steps,
            loads or [],
            early_loads or [],
            saves or [],
            states or [],
            settled=settled,
        )
        worker = self.worker
        worker.begin_step(plan)
        worker.start_loads()
        for name in NAMES[:num_layers]:
            compute(name, self.caches[name])
            worker.wait_for_load(name)
            self.seen[name] = self.caches[name].clone()
            worker.save_layer(name)
        worker.end_step()
        return worker.done()

    def reserve(self, blocks: range) -> list[BlockCopy]:
        pairs = [(KEYS[i], KEYS[i - 1] if i else None) for i in blocks]
        slots = self.client.exchange(reserve=pairs).reserved
        return [BlockCopy(i, slot) for i, slot in zip(blocks, slots, strict=True) if slot]

    def acquire(self, blocks: range) -> list[BlockCopy]:
        slots = self.client.exchange(acquire=KEYS[blocks.start : blocks.stop]).slots
        return [BlockCopy(i, slot) for i, slot in zip(blocks, slots, strict=False)]


def number_blocks(name: str, cache: torch.Tensor) -> None:
    """Each element says which layer and block it belongs to."""
    layer = NAMES.index(name)
    cache[:] = torch.arange(BLOCKS)[:, None] + 100.0 * layer


def numbered() -> dict[str, torch.Tensor]:
    caches = {name: torch.empty(BLOCKS, PAGE_BYTES // 4) for name in NAMES}
    for name, cache in caches.items():
        number_blocks(name, cache)
    return caches


def started(path: Path) -> Forked:
    return fork_store(path, 64 * FINGERPRINT.slot_bytes, "--poison-free-slots")


class LayeredEngines:
    """Engines of one test, over the store at ``socket_path``, closed with ``stack``."""

    def __init__(self, socket_path: Path, salt: str, stack: ExitStack) -> None:
        self._socket_path = socket_path
        self._salt = salt
        self._stack = stack

    def make(
        self,
        fill: float = -1.0,
        share: RankShare = RankShare(),  # noqa: B008 - it is frozen
        worker_class: type[StoreConnectorWorker] = StoreConnectorWorker,
    ) -> LayeredEngine:
        """Make an engine whose KV cache is filled with one number."""
        client = StoreClient(
            self._socket_path,
            msgspec.structs.replace(FINGERPRINT, salt=self._salt),
            client_name=f"{self._salt}-{fill}",
            num_writers=share.num_ranks,
            timeout_s=DEADLINE_S,
        )
        client.connect()
        self._stack.callback(client.close)
        made = LayeredEngine(client, fill, worker_class(client, share))
        self._stack.callback(made.worker.close)
        return made
