"""Blocks of a unit between a host and guests, over shared memory."""

from __future__ import annotations

import mmap
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from banaserve.engine.vllm.migration import block_mover
from banaserve.engine.vllm.migration.block_mover import BlockMover
from banaserve.engine.vllm.migration.host_kv import HostKv
from banaserve.engine.vllm.migration.modules import HeadSet, LayerRange, Modules
from banaserve.engine.vllm.migration.remote_kv import RemoteKv
from banaserve.engine.vllm.migration.units import Unit
from banaserve.errors import GuestLostError
from banaserve.transport.interface import OfferedRegion, Transport
from banaserve.transport.options import TransportOptions
from banaserve.transport.registry import create

PAGE = mmap.PAGESIZE
NUM_BLOCKS = 5
LAYERS = LayerRange(0, 3)
HEADS = HeadSet({0: (1,), 2: (0, 2)})


@pytest.fixture
def host() -> HostKv:
    """Three layers of three heads, one page each; every byte tells where it belongs."""
    shape = (NUM_BLOCKS, 3, PAGE // 8, 2)
    kv = HostKv({f"l{i}": torch.zeros(shape) for i in range(3)}, 1.0)
    for layer, tensor in enumerate(kv.tensors.values()):
        for block in range(NUM_BLOCKS):
            for head in range(3):
                tensor[block, head] = 100 * layer + 10 * block + head
    return kv


@pytest.fixture
def transports(tmp_path: Path) -> Iterator[tuple[Transport, Transport]]:
    options = TransportOptions(folder=str(tmp_path), secret=secrets.token_bytes(32))
    both = create("shm", options), create("shm", options)
    yield both
    for one in both:
        one.close()


class Place:
    """A guest's memory, and the host's way to it."""

    def __init__(self, host: HostKv, unit: Unit, transports: tuple[Transport, Transport]) -> None:
        runs = {name: host.runs(unit.heads(name)) for name in unit.names}
        places, end = {}, 0
        for name, found in runs.items():
            places[name] = end
            end += NUM_BLOCKS * sum(run.num_bytes for run in found)
        self.offered: OfferedRegion = transports[1].offer(end, 1)
        self.kv = RemoteKv(transports[0], self.offered.descriptor, places, runs)


def unit_of(modules: Modules) -> Unit:
    return Unit("u", modules, {i: f"l{i}" for i in range(3)})


def heads_of(unit: Unit, name: str) -> list[int]:
    return list(unit.heads(name) or range(3))


@pytest.mark.parametrize("modules", [LAYERS, HEADS], ids=["layers", "heads"])
@pytest.mark.parametrize("round_bytes", [1, 64 << 20], ids=["block by block", "at once"])
def test_blocks_go_on_to_another_guest_and_home(
    host: HostKv, transports: tuple[Transport, Transport], modules: Modules, round_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(block_mover, "_ROUND_BYTES", round_bytes)
    unit, blocks = unit_of(modules), [0, 1, 3]
    before = {name: tensor.clone() for name, tensor in host.tensors.items()}
    one, other = (Place(host, unit, transports) for _ in range(2))
    one.kv.warm(blocks)
    size = len(blocks) * PAGE * sum(len(heads_of(unit, name)) for name in unit.names)
    assert BlockMover(unit, host, None, one.kv).copy(blocks) == size
    assert BlockMover(unit, host, one.kv, other.kv).copy(blocks) == size
    for name in unit.names:
        host.tensors[name][:, heads_of(unit, name)] = -1
    assert BlockMover(unit, host, other.kv, None).copy(blocks) == size
    for name, tensor in host.tensors.items():
        moved = heads_of(unit, name) if name in unit.names else []
        kept = [head for head in range(3) if head not in moved]
        assert torch.equal(tensor[:, kept], before[name][:, kept])
        assert torch.equal(tensor[blocks][:, moved], before[name][blocks][:, moved])
        assert (tensor[[2, 4]][:, moved] == -1).all(), "blocks that were not copied"


def test_a_copy_stops_between_two_submissions(
    host: HostKv, transports: tuple[Transport, Transport], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_mover, "_ROUND_BYTES", 1)
    unit = unit_of(LAYERS)
    mover = BlockMover(unit, host, None, Place(host, unit, transports).kv)
    answers = iter([False, False, True])
    assert mover.copy([0, 1, 2, 3], lambda: next(answers)) == 2 * 9 * PAGE


def test_a_broken_connection_is_opened_again_as_long_as_the_guest_offers(
    host: HostKv, transports: tuple[Transport, Transport]
) -> None:
    unit = unit_of(LAYERS)
    place = Place(host, unit, transports)
    mover = BlockMover(unit, host, None, place.kv)
    mover.copy([0])
    place.kv._bulk.region.close()
    assert mover.copy([1]) == 9 * PAGE
    page = place.offered.memory.view()[3 * PAGE : 4 * PAGE].view("float32")
    assert (page == 10).all(), "block 1 of layer 0, head 0"
    place.offered.close()
    for _ in range(2):
        with pytest.raises(GuestLostError):
            mover.copy([2])


def test_what_is_closed_stays_closed(host: HostKv, transports: tuple[Transport, Transport]) -> None:
    unit = unit_of(LAYERS)
    place = Place(host, unit, transports)
    place.kv.close()
    with pytest.raises(GuestLostError, match="closed"):
        BlockMover(unit, host, None, place.kv).copy([0])


def test_copies_of_an_old_epoch_are_refused(
    host: HostKv, transports: tuple[Transport, Transport]
) -> None:
    unit = unit_of(HEADS)
    place = Place(host, unit, transports)
    place.offered.advance(2, 1.0)
    mover = BlockMover(unit, host, None, place.kv)
    with pytest.raises(GuestLostError, match="epoch 2"):
        mover.copy([0])
    place.kv.epoch = 2
    assert mover.copy([0]) == 3 * PAGE
