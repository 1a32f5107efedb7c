"""KV on a device: packed blocks that land in host memory, over a real transport, on a CPU."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from banaserve.base.errors import GuestLostError, MigrationError, ProtocolError
from banaserve.kernels.reference import ReferenceKernels
from banaserve.migration.host import block_mover
from banaserve.migration.host.block_mover import BlockMover
from banaserve.migration.kv import host_kv, kv_staging
from banaserve.migration.kv.host_kv import DeviceKv, HostKv, KvRun
from banaserve.migration.kv.kv_staging import StagingBuffer, make_kv
from banaserve.migration.kv.remote_kv import StagedRemoteKv
from banaserve.migration.rpc import messages
from banaserve.migration.units.base import MigrationUnit
from banaserve.migration.units.heads import HeadSet
from banaserve.migration.units.host_unit import HostUnit
from banaserve.migration.units.layers import LayerRange
from banaserve.transport.backends.cuda_ipc import CudaIpcTransport
from banaserve.transport.interface import Transport, TransportOptions
from banaserve.transport.memory import Memory
from banaserve.transport.registry import create
from emulated_gpu import EmulatedGpu
from unit_doubles import unit_of

LAYERS, BLOCKS, HEADS, TOKENS, HEAD_SIZE = 3, 7, 3, 4, 64
SHAPE = BLOCKS, HEADS, TOKENS, 2 * HEAD_SIZE
PAGE_BYTES = HEADS * TOKENS * 2 * HEAD_SIZE * 4
KERNELS = ReferenceKernels(torch.float32)
NAMES = [f"l{i}" for i in range(LAYERS)]
WHOLE = LayerRange(0, LAYERS)
SOME = HeadSet({0: (1,), 2: (0, 2)})


@pytest.fixture(params=["shm", "cuda_ipc"])
def transports(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[list[Transport]]:
    """Of memory of the host, or of an emulated GPU."""
    options = TransportOptions(folder=str(tmp_path), secret=secrets.token_bytes(32))
    both: list[Transport] = [
        create("shm", options)
        if request.param == "shm"
        else CudaIpcTransport(options, EmulatedGpu())
        for _ in range(2)
    ]
    yield both
    for one in both:
        one.close()


@pytest.fixture(params=["one piece", "many pieces"])
def _pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "many pieces":
        monkeypatch.setattr(kv_staging, "STAGING_BYTES", 1)
        monkeypatch.setattr(block_mover, "_BOUNCE_BYTES", 2 * LAYERS * PAGE_BYTES)


def random_host(seed: int) -> HostKv:
    host = HostKv({name: torch.zeros(SHAPE) for name in NAMES}, 1.0, KERNELS)
    for name, tensor in host.tensors.items():
        tensor[:] = torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed + ord(name[1])))
    return host


class Guest:
    """A guest's KV, and the host's way to it without a channel."""

    def __init__(self, host: HostKv, unit: HostUnit, transports: list[Transport]) -> None:
        heads = {n: len(unit.heads(n) or range(HEADS)) for n in unit.names}
        shape = host.shape("LBHNC", TOKENS)
        self.caches = make_kv(shape, heads, BLOCKS, torch.device("cpu"))
        self.landing = StagingBuffer(transports[1], self.caches, KERNELS, 1)
        region = self.landing.region
        link: Any = SimpleNamespace(transport=transports[0], ask=self._ask, lane=None)
        runs = {n: host.runs(unit.heads(n)) for n in unit.names}
        self.kv = StagedRemoteKv(link, "u", region.descriptor, runs, region.memory.num_bytes)

    def _ask(self, request: Any, expected: type[Any]) -> Any:
        try:
            self.landing.copy(messages.request_decoder([])(messages.encode(request)))
        except ProtocolError as refused:
            raise MigrationError(str(refused)) from refused
        return messages.StepsDone()


@pytest.mark.usefixtures("_pieces")
@pytest.mark.parametrize("modules", [WHOLE, SOME], ids=["layers", "heads"])
def test_blocks_go_to_a_guest_on_to_another_and_home(
    modules: MigrationUnit, transports: list[Transport]
) -> None:
    host, blocks = random_host(1), [6, 0, 3, 2]
    unit = unit_of(modules, host)
    before = {name: tensor.clone() for name, tensor in host.tensors.items()}
    one, other = (Guest(host, unit, transports) for _ in range(2))
    moved = {name: list(unit.heads(name) or range(HEADS)) for name in unit.names}
    size = len(blocks) * PAGE_BYTES // HEADS * sum(map(len, moved.values()))
    assert BlockMover(unit, host, None, one.kv).copy(blocks) == size
    for name, heads in moved.items():
        assert torch.equal(one.caches[name][blocks], before[name][blocks][:, heads])
        assert not one.caches[name][[1, 4, 5]].any(), "blocks that were not copied"
    assert BlockMover(unit, host, one.kv, other.kv).copy(blocks) == size
    for name, heads in moved.items():
        host.tensors[name][:, heads] = float("nan")
    assert BlockMover(unit, host, other.kv, None).copy(blocks) == size
    for name, tensor in host.tensors.items():
        heads = moved.get(name, [])
        kept = [head for head in range(HEADS) if head not in heads]
        assert torch.equal(tensor[:, kept], before[name][:, kept])
        assert torch.equal(tensor[blocks], before[name][blocks])
        assert tensor[[1, 4, 5]][:, heads].isnan().all()


@pytest.mark.usefixtures("_pieces")
def test_what_a_step_waits_for_lands_beside_what_is_copied_in_the_background(
    transports: list[Transport],
) -> None:
    """As the store's copies of layers that have moved: single pages of memory of another kind."""
    host = random_host(1)
    unit = unit_of(WHOLE, host)
    guest = Guest(host, unit, transports)
    pool = np.random.default_rng(3).standard_normal(9 * PAGE_BYTES // 4).astype(np.float32)
    memory, slots = Memory.of(pool), np.asarray([8, 1, 4], np.int64) * PAGE_BYTES
    assert guest.kv.copy([5, 2, 0], memory, {"l1": slots}, to_guest=True, urgent=True) == []
    pages = torch.from_numpy(pool).view(9, *SHAPE[1:])
    assert torch.equal(guest.caches["l1"][[5, 2, 0]], pages[[8, 1, 4]])
    assert guest.kv.copy([2], memory, {"l1": slots[:1] * 0}, to_guest=False, urgent=True) == []
    assert torch.equal(pages[0], pages[1])


def test_a_guest_refuses_pages_that_make_no_sense(transports: list[Transport]) -> None:
    host = random_host(1)
    guest = Guest(host, unit_of(SOME, host), transports)
    end = guest.landing.region.memory.num_bytes
    for wrong, why in (
        ({"epoch": 2}, "epoch 1, not 2"),
        ({"names": ("l1",)}, "l1 has no KV"),
        ({"blocks": (0, BLOCKS)}, "not here"),
        ({"blocks": (-1,)}, "not here"),
        ({"blocks": (1, 1)}, "twice"),
        ({"start": -1}, "outside"),
        ({"start": end - 4}, "outside"),
    ):
        fields = {"epoch": 1, "to_device": True, "start": 0, "names": ("l0",), "blocks": (0,)}
        with pytest.raises(ProtocolError, match=why):
            guest.landing.copy(messages.CopyPages("u", **{**fields, **wrong}))  # type: ignore[arg-type]
    guest.landing.region.advance(2, 1.0)
    memory = Memory.of(np.zeros(PAGE_BYTES, np.uint8))
    with pytest.raises(GuestLostError, match="epoch"):
        guest.kv.copy([0], memory, {"l0": np.zeros(1, np.int64)}, to_guest=True)
    assert not any(cache.any() for cache in guest.caches.values())


@pytest.mark.parametrize("saves", [True, False])
def test_a_run_of_heads_goes_to_the_store_and_comes_back(saves: bool) -> None:
    host = random_host(1)
    before = host.tensors["l1"].clone()
    pool = torch.randn(4, *SHAPE[1:], generator=torch.Generator().manual_seed(9))
    was = pool.clone()
    memory = Memory(pool.data_ptr(), pool.numel() * 4, True, pool)
    run = KvRun(host.head_bytes, 2 * host.head_bytes)
    slots = np.asarray([3, 0], np.int64) * PAGE_BYTES + run.in_page
    host.copy_run("l1", run, [4, 6], memory, slots, saves=saves)
    if saves:
        was[[3, 0], 1:] = before[[4, 6], 1:]
    else:
        before[[4, 6], 1:] = was[[3, 0], 1:]
    assert torch.equal(pool, was)
    assert torch.equal(host.tensors["l1"], before)


def test_pages_cross_by_way_of_a_stage_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for two pages, where a GPU has a stage and a CPU has none."""
    cache = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    other = torch.zeros(SHAPE)
    both = DeviceKv({"a": cache}, KERNELS), DeviceKv({"a": other}, KERNELS)
    for one in both:
        one._stage = torch.empty(2 * PAGE_BYTES + 8, dtype=torch.uint8)
    blocks, targets, heads = [6, 1, 2, 0, 5], [0, 1, 2, 3, 4], [2, 0]
    pages = torch.zeros(len(blocks), PAGE_BYTES, dtype=torch.uint8)
    both[0].pack("a", blocks, pages, heads)
    both[1].unpack("a", targets, pages, heads)
    assert torch.equal(other[targets][:, heads], cache[blocks][:, heads])
    assert not other[:, 1].any()
    assert not other[5:].any()


def test_other_devices_get_a_stage_and_all_of_the_kv_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    populated: list[int] = []
    monkeypatch.setattr(
        kv_staging, "make_slab",
        lambda num_bytes, device: SimpleNamespace(
            populate=populated.append,
            tensor=lambda shape, dtype: torch.empty(shape, dtype=dtype, device=device),
        ),
    )  # fmt: skip
    shape = random_host(1).shape("LBHNC", TOKENS)
    meta = torch.device("meta")
    caches = make_kv(shape, {"a": 2, "b": 3}, 0, meta)
    assert {cache.device for cache in caches.values()} == {meta}
    assert populated == [BLOCKS * PAGE_BYTES // HEADS * 2, BLOCKS * PAGE_BYTES]
    stage = DeviceKv(caches, KERNELS)._stage
    assert stage is not None
    assert (stage.device, len(stage)) == (meta, host_kv.STAGE_BYTES)
    make_kv(shape, {"a": 3}, 2, torch.device("cpu"))
    assert populated[2:] == [2 * PAGE_BYTES], "on a CPU only what is asked for"


def test_pages_of_a_gpu_are_pinned_until_their_region_closes(
    transports: list[Transport], monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[Any] = []

    class Pinned:
        """In the place of CUDA's."""

        def __init__(self, gpu: Any, wait_for_copies: Any) -> None:
            events.append(gpu.type)

        def pin(self, view: Any) -> None:
            events.append((view.ctypes.data, view.nbytes))

        def release(self) -> None:
            events.append(f"released, {len(closed)} closed")

    monkeypatch.setattr(kv_staging, "PinnedPool", Pinned)
    monkeypatch.setattr(kv_staging, "DeviceKv", lambda *_: SimpleNamespace(page_bytes={"a": 64}))
    cache: Any = SimpleNamespace(device=SimpleNamespace(type="cuda"))
    made = StagingBuffer(transports[0], {"a": cache}, KERNELS, 1)
    memory, close, closed = made.region.memory, made.region.close, []
    monkeypatch.setattr(made.region, "close", lambda: closed.append(1) or close())
    made.close()
    assert events == ["cuda", (memory.address, kv_staging.STAGING_BYTES), "released, 0 closed"]
    assert closed == [1]


def test_kv_that_finds_no_room_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise MemoryError("7 of 9 granules")

    monkeypatch.setattr(kv_staging, "make_slab", full)
    with pytest.raises(MigrationError, match="no memory for its KV: 7 of 9"):
        make_kv(random_host(1).shape("LBHNC", TOKENS), {"a": 1}, 0, torch.device("meta"))


def test_on_a_gpu_the_hosts_kv_takes_the_place_of_vllms_and_does_not_grow() -> None:
    theirs = {name: torch.empty(SHAPE, device="meta") for name in NAMES}
    host = HostKv(theirs, 2.0, KERNELS)
    assert [tensor.untyped_storage().nbytes() for tensor in theirs.values()] == [0] * LAYERS
    assert (host.num_blocks, host.max_blocks) == (BLOCKS, BLOCKS)
    assert {tensor.device.type for tensor in host.tensors.values()} == {"meta"}
    freed = host.free("l0", [1]), host.free("l0", None, [1, 2])
    assert [one.freed_bytes for one in freed] == [0, 0], "blocks are written without asking"
    assert freed[0].predicted_bytes == BLOCKS * PAGE_BYTES // HEADS
