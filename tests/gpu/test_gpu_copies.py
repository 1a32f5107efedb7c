"""Copies between a KV cache on a GPU and the pool: bytes, order, and both directions at once."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
from banaserve.engine.connector.worker_side.gpu_block_copy import GpuCopier
from banaserve.kvstore.fingerprint import Fingerprint
from banaserve.kvstore.pool import PoolView, SlotPool

OURS, THEIRS = (importlib.util.find_spec(name) for name in ("banaserve._native_cuda", "vllm"))
if OURS is None and THEIRS is None:
    pytest.skip("built without BANASERVE_CUDA=1, and no vLLM to copy with", allow_module_level=True)

ALREADY_REGISTERED = 712
LAYERS, BLOCKS, SLOTS, PAGE_BYTES = 4, 64, 32, 64 << 10
FINGERPRINT = Fingerprint(
    model="m",
    dtype="float32",
    block_size_tokens=16,
    num_layers=LAYERS,
    num_kv_heads=8,
    head_size=64,
    layout="LBHNC",
    page_bytes=PAGE_BYTES,
)


def copier_of(layers: list[torch.Tensor]) -> GpuCopier:
    return GpuCopier(layers, PAGE_BYTES, 0)


@pytest.fixture
def view() -> Iterator[PoolView]:
    pool = SlotPool(SLOTS * FINGERPRINT.slot_bytes)
    yield PoolView(pool.fd, pool.num_bytes, 1, FINGERPRINT)
    pool.close()


def random_caches(seed: int) -> list[torch.Tensor]:
    draws = torch.Generator("cuda").manual_seed(seed)
    shape = (BLOCKS, PAGE_BYTES // 4)
    return [torch.randn(shape, device="cuda", generator=draws) for _ in range(LAYERS)]


def test_what_is_saved_is_loaded(view: PoolView) -> None:
    caches, others = random_caches(1), random_caches(2)
    writer, reader = copier_of(caches), copier_of(others)
    blocks, slots, targets = [5, 0, 63, 17], [31, 2, 3, 0], [1, 2, 60, 4]
    for layer in range(LAYERS):
        assert writer.save(layer, view, blocks, slots, writer.mark()).finish() > 0
    for layer in range(LAYERS):
        reader.load(layer, view, targets, slots, reader.mark()).join()
        # Without the join this would read what is there before the load.
        assert torch.equal(others[layer][targets], caches[layer][blocks])


@pytest.mark.parametrize("order", ["LHBNC", "BLHNC", "BHLNC"])
def test_blocks_in_any_order_of_vllm_are_pages_in_the_pool(view: PoolView, order: str) -> None:
    sizes = {"L": LAYERS, "B": BLOCKS, "H": 8, "N": 16, "C": 128}
    mine, others = (
        list(
            torch.randn([sizes[axis] for axis in order], device="cuda").permute(
                [order.index(axis) for axis in "LBHNC"]
            )
        )
        for _ in range(2)
    )
    plain = [torch.zeros(BLOCKS, 8, 16, 128, device="cuda") for _ in range(LAYERS)]
    blocks, slots, targets = list(range(40, 10, -1)), list(range(1, 31)), list(range(30))
    writer = copier_of(mine)
    readers = [(layers, copier_of(layers)) for layers in (others, plain)]
    for layer in range(LAYERS):
        writer.save(layer, view, blocks, slots, writer.mark()).finish()
        for layers, reader in readers:
            reader.load(layer, view, targets, slots, reader.mark()).join()
            assert torch.equal(layers[layer][targets], mine[layer][blocks])


def test_copies_wait_for_the_work_before_their_mark(view: PoolView) -> None:
    caches = random_caches(3)
    copier = copier_of(caches)
    busy = torch.randn(4096, 4096, device="cuda")
    for layer in range(LAYERS):
        for _ in range(20):
            busy = busy @ busy / 64
        caches[layer].fill_(float(layer))
        copier.save(layer, view, [7], [layer], copier.mark()).finish()
        first = layer * view.slot_bytes + view.fingerprint.offset_bytes(layer, 0)
        saved = torch.from_numpy(view.memory[first : first + PAGE_BYTES]).view(torch.float32)
        assert (saved == layer).all()


def test_both_directions_at_once(view: PoolView) -> None:
    caches = random_caches(4)
    copier = copier_of(caches)
    expected = [cache.clone() for cache in caches]
    blocks, slots = list(range(16)), list(range(16))
    for layer in range(LAYERS):
        copier.save(layer, view, blocks, slots, copier.mark()).finish()
    for layer in range(LAYERS):
        copier.load(layer, view, list(range(32, 48)), slots, copier.mark()).join()
        copier.save(layer, view, list(range(16, 32)), list(range(16, 32)), copier.mark())
    torch.cuda.synchronize()
    for cache, before in zip(caches, expected, strict=True):
        assert torch.equal(cache[32:48], before[:16])
        assert torch.equal(cache[:32], before[:32])


def test_the_pool_is_pinned_for_the_copies_and_given_back(view: PoolView) -> None:
    copier, runtime = copier_of(random_caches(5)), torch.cuda.cudart()
    pool = view.base_address, view.memory.size, 0
    copier.save(0, view, [1], [1], copier.mark()).finish()
    assert int(runtime.cudaHostRegister(*pool)) == ALREADY_REGISTERED
    with contextlib.suppress(RuntimeError):  # CUDA may report that call once more
        torch.ones(1, device="cuda")
    copier.close()
    assert int(runtime.cudaHostRegister(*pool)) == 0
    # Pinned by somebody else: used, left alone, and no later launch hears of the refusal.
    copier.load(0, view, [2], [1], copier.mark()).finish()
    assert torch.ones(1, device="cuda").item() == 1
    copier.close()
    assert int(runtime.cudaHostUnregister(view.base_address)) == 0
