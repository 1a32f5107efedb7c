"""A guest's KV on a GPU: blocks that cross by way of pages, and heads that attend there."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
from banaserve.kernels.interface import Heads
from banaserve.kernels.reference import ReferenceKernels
from banaserve.kernels.registry import pick
from banaserve.migration.host.block_mover import BlockMover
from banaserve.migration.kv.host_kv import HostKv
from banaserve.migration.kv.kv_staging import StagingBuffer, make_kv
from banaserve.migration.kv.remote_kv import StagedRemoteKv
from banaserve.migration.modules.paged_attention import KernelsAttention, StepBatches, write_tokens
from banaserve.migration.rpc import messages
from banaserve.migration.rpc.tensors import to_device, to_host
from banaserve.transport.interface import TransportOptions
from banaserve.transport.registry import create
from kernel_cases import joined

CUDA = torch.device("cuda", 0)
LAYERS, BLOCKS, KV_HEADS, GROUP, SIZE, HEAD_SIZE = 3, 40, 4, 4, 16, 128
SHAPE = BLOCKS, KV_HEADS, SIZE, 2 * HEAD_SIZE
NAMES = [f"l{i}" for i in range(LAYERS)]


@pytest.mark.parametrize(
    ("layers", "chosen"),
    [(range(LAYERS), {}), ((0, 2), {0: (1,), 2: (0, 3)})],
    ids=["layers", "heads"],
)
def test_blocks_go_to_a_guest_and_home(
    layers: Sequence[int], chosen: dict[int, tuple[int, ...]], tmp_path: Path
) -> None:
    # Plain values in the place of units, which import vLLM: this runs without it.
    kernels = pick(CUDA).kernels
    host = HostKv({n: torch.empty(SHAPE, device=CUDA) for n in NAMES}, 1.0, kernels)
    draws = torch.Generator(CUDA).manual_seed(1)
    for tensor in host.tensors.values():
        tensor.copy_(torch.randn(SHAPE, device=CUDA, generator=draws))
    before = {name: tensor.clone() for name, tensor in host.tensors.items()}
    unit: Any = SimpleNamespace(
        names=[NAMES[layer] for layer in layers],
        heads=lambda name: chosen.get(NAMES.index(name)),
        single_blocks=None,
        holding=contextlib.nullcontext,
    )
    moved = {name: list(unit.heads(name) or range(KV_HEADS)) for name in unit.names}
    options = TransportOptions(folder=str(tmp_path), secret=secrets.token_bytes(32))
    ours, theirs = (create("shm", options) for _ in range(2))
    caches = make_kv(
        host.shape("LBHNC", SIZE), {n: len(found) for n, found in moved.items()}, 0, CUDA
    )
    landing = StagingBuffer(theirs, caches, kernels, 1)

    def ask(request: messages.CopyPages, expected: type[Any]) -> Any:
        landing.copy(request)
        return messages.StepsDone()

    link: Any = SimpleNamespace(transport=ours, ask=ask, lane=None)
    runs = {name: host.runs(unit.heads(name)) for name in unit.names}
    region = landing.region
    kv = StagedRemoteKv(link, "u", region.descriptor, runs, region.memory.num_bytes)
    blocks = [39, 0, 7, 21, 8]
    BlockMover(unit, host, None, kv).copy(blocks)
    for name, heads in moved.items():
        assert torch.equal(caches[name][blocks], before[name][blocks][:, heads])
        host.tensors[name][:, heads] = float("nan")
    BlockMover(unit, host, kv, None).copy(blocks)
    for name, tensor in host.tensors.items():
        assert torch.equal(tensor[blocks], before[name][blocks])
    ours.close()
    theirs.close()


def test_heads_apart_attend_on_the_gpu_as_the_reference_says() -> None:
    kernels = pick(CUDA).kernels
    backend = SimpleNamespace(forward_includes_kv_cache_update=False)
    draws = torch.Generator().manual_seed(2)
    cache = torch.randn(SHAPE, generator=draws)
    key, value = (torch.randn(6, KV_HEADS, HEAD_SIZE, generator=draws) for _ in range(2))
    query = torch.randn(6, KV_HEADS * GROUP, HEAD_SIZE, generator=draws)
    slots = torch.tensor([*range(SIZE, SIZE + 5), 3 * SIZE + 7])
    batch = {
        "query_start_loc": torch.tensor([0, 5, 6], dtype=torch.int32),
        "seq_lens": torch.tensor([21, 40], dtype=torch.int32),
        "block_table": torch.tensor([[4, 1, 0], [2, 5, 3]], dtype=torch.int32),
    }

    def attend(device: torch.device, chosen: Any, groups: list[tuple[int, ...]]) -> torch.Tensor:
        layer = SimpleNamespace(
            impl=SimpleNamespace(sliding_window=None, logits_soft_cap=None, scale=HEAD_SIZE**-0.5),
            kv_cache_dtype="auto", head_size=HEAD_SIZE, head_size_v=HEAD_SIZE,
            attn_backend=backend, num_heads=KV_HEADS * GROUP, num_kv_heads=KV_HEADS,
            kv_cache=cache,
        )  # fmt: skip
        whole = KernelsAttention(layer, "l", chosen, StepBatches())
        there = {name: to_device(tensor, device) for name, tensor in batch.items()}
        metadata = SimpleNamespace(causal=True, num_actual_tokens=6, max_seq_len=40, **there)
        mine = to_device(cache.clone(), device)
        write_tokens(mine, *(to_device(tensor, device) for tensor in (key, value, slots)))
        asking = to_device(query, device)
        parts = [whole.attend(asking, mine, metadata, Heads(g, GROUP, g)) for g in groups]
        return to_host(joined(parts, groups))

    every = tuple(range(KV_HEADS))
    expected = attend(torch.device("cpu"), ReferenceKernels(), [every])
    assert torch.allclose(attend(CUDA, kernels, [(2, 0), (1, 3)]), expected, atol=2e-3)
