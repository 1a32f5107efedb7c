"""What a guest on a GPU does with its KV, in Triton's interpreter, against the reference."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs in a process of its own, with TRITON_INTERPRET=1", allow_module_level=True)

from banaserve.kernels.interface import Heads, Kernels
from banaserve.kernels.reference import ReferenceKernels
from banaserve.kernels.triton.kernels import TritonKernels
from banaserve.migration.kv.host_kv import DeviceKv
from banaserve.migration.modules.paged_attention import KernelsAttention, StepBatches, write_tokens
from kernel_cases import joined

BLOCKS, SIZE, KV_HEADS, GROUP, HEAD_SIZE = 6, 16, 3, 2, 64
REFERENCE = ReferenceKernels()
TRITON = TritonKernels()


def layer() -> Any:
    backend = SimpleNamespace(forward_includes_kv_cache_update=False)
    impl = SimpleNamespace(sliding_window=None, logits_soft_cap=None, scale=HEAD_SIZE**-0.5)
    draws = torch.Generator().manual_seed(1)
    return SimpleNamespace(
        impl=impl,
        kv_cache_dtype="auto",
        head_size=HEAD_SIZE,
        head_size_v=HEAD_SIZE,
        attn_backend=backend,
        num_heads=KV_HEADS * GROUP,
        num_kv_heads=KV_HEADS,
        kv_cache=torch.randn(BLOCKS, KV_HEADS, SIZE, 2 * HEAD_SIZE, generator=draws),
    )


def outputs(kernels: Kernels, here: tuple[int, ...]) -> torch.Tensor:
    """Of a prefilling and a decoding sequence: their heads ``here``, and the others, joined."""
    attention = layer()
    whole = KernelsAttention(attention, "a", kernels, StepBatches())
    metadata = SimpleNamespace(
        causal=True,
        num_actual_tokens=6,
        max_seq_len=40,
        query_start_loc=torch.tensor([0, 5, 6], dtype=torch.int32),
        seq_lens=torch.tensor([21, 40], dtype=torch.int32),
        block_table=torch.tensor([[4, 1, 0], [2, 5, 3]], dtype=torch.int32),
    )
    slots = torch.tensor([16, 17, 18, 19, 20, 3 * SIZE + 7])
    draws = torch.Generator().manual_seed(2)
    key, value = (torch.randn(6, KV_HEADS, HEAD_SIZE, generator=draws) for _ in range(2))
    query = torch.randn(6, KV_HEADS * GROUP, HEAD_SIZE, generator=draws)
    write_tokens(attention.kv_cache, key, value, slots)
    there = tuple(head for head in range(KV_HEADS) if head not in here)
    groups = [heads for heads in (here, there) if heads]
    parts = [
        whole.attend(query, attention.kv_cache, metadata, Heads(heads, GROUP, heads))
        for heads in groups
    ]
    return joined(parts, groups)


@pytest.mark.parametrize("here", [(0, 1, 2), (1,), (0, 2)])
def test_heads_apart_attend_as_the_reference_says(here: tuple[int, ...]) -> None:
    assert torch.allclose(outputs(TRITON, here), outputs(REFERENCE, (0, 1, 2)), atol=1e-5)


def test_blocks_are_packed_as_the_reference_says() -> None:
    cache, other = layer().kv_cache, torch.zeros(BLOCKS, KV_HEADS, SIZE, 2 * HEAD_SIZE)
    blocks, heads = [5, 0, 2], [2, 0]
    there = DeviceKv({"a": cache}, TRITON)
    pages = torch.zeros(2, len(blocks), there.page_bytes["a"], dtype=torch.uint8)
    there.pack("a", blocks, pages[0], heads)
    DeviceKv({"a": cache}, REFERENCE).pack("a", blocks, pages[1], heads)
    assert torch.equal(pages[0], pages[1])
    DeviceKv({"a": other}, TRITON).unpack("a", blocks, pages[0], heads)
    assert torch.equal(other[blocks][:, heads], cache[blocks][:, heads])
    assert not other[:, 1].any()


def test_a_move_packs_while_a_step_attends() -> None:
    """In a guest's and a host's process two threads launch kernels."""
    cache, expected = layer().kv_cache, outputs(REFERENCE, (1,))
    blocks, kv = [5, 0, 2, 1], DeviceKv({"a": cache}, TRITON)
    pages = torch.zeros(len(blocks), kv.page_bytes["a"], dtype=torch.uint8)
    is_over = threading.Event()

    def pack() -> int:
        rounds = 0
        while not is_over.is_set() or not rounds:
            kv.pack("a", blocks, pages.zero_())
            rounds += 1
        return rounds

    with ThreadPoolExecutor(1) as executor:
        packing = executor.submit(pack)
        try:
            found = [outputs(TRITON, (1,)) for _ in range(3)]
        finally:
            is_over.set()
        assert packing.result() > 0
    assert all(torch.allclose(one, expected, atol=1e-5) for one in found)
    assert torch.equal(pages.view(torch.float32).view(len(blocks), *cache.shape[1:]), cache[blocks])
