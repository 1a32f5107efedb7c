"""Tensors of steps that pass in memory of a GPU, which is emulated: both ends are on a CPU."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from banaserve.base.errors import ProtocolError
from banaserve.base.net.framing import LENGTH_BYTES
from banaserve.migration.rpc import gpu_lane
from banaserve.migration.rpc.gpu_lane import MIN_BYTES, GuestLane, HostLane, LaneHalf
from banaserve.migration.rpc.tensors import TensorBundle, from_wire, restore
from banaserve.transport.backends.cuda_ipc import CudaIpcTransport
from banaserve.transport.channels import frames
from banaserve.transport.channels.frames import ELSEWHERE
from banaserve.transport.errors import TransportError
from banaserve.transport.interface import Message, Tensor, TransportOptions
from emulated_gpu import EmulatedGpu

CPU = torch.device("cpu")
LANE_BYTES = 16 * MIN_BYTES
Ends = tuple[HostLane, GuestLane]


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    options = TransportOptions(folder=str(tmp_path), secret=secrets.token_bytes(32))
    offering, opening = (CudaIpcTransport(options, EmulatedGpu()) for _ in range(2))
    guest = GuestLane(offering, CPU, LANE_BYTES)
    yield HostLane(opening.open(guest.region.descriptor, 5.0), CPU), guest
    opening.close()
    offering.close()


def tensor(num_bytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_bytes // 4, generator=torch.Generator().manual_seed(seed))


def begun(host: HostLane) -> TensorBundle:
    host.begin()
    return TensorBundle(host.write)


def sent(bundle: TensorBundle, lane: HostLane) -> list[Tensor]:
    """The tensors as they arrive: by way of a frame."""
    message = Message(b"", (*bundle.tensors, *lane.sent()))
    frame = frames.encode(message, 1, frames.ONE_WAY, 0)
    described = frames.HEADERS.decode(bytes(frame[0])[LENGTH_BYTES:])
    return [
        Tensor(dtype, shape, np.frombuffer(bytes(data), np.uint8).copy())
        for (dtype, shape), data in zip(described.tensors, frame[1:], strict=True)
    ]


def test_large_tensors_pass_beside_a_message_and_small_ones_within(ends: Ends) -> None:
    host, guest = ends
    large, small, columns = tensor(MIN_BYTES), tensor(64), tensor(2 * MIN_BYTES).view(2, -1).T
    bundle = begun(host)
    packed = bundle.put_all({"large": large, "small": small, "columns": columns, "plain": 3})
    arrived = sent(bundle, host)
    assert [one.dtype for one in arrived] == [ELSEWHERE, "float32", ELSEWHERE, ELSEWHERE]
    assert sum(one.data.nbytes for one in arrived) < 64 + 200
    found = restore(packed, guest.received(arrived))
    assert torch.equal(found["large"], large)
    assert torch.equal(found["small"], small)
    assert torch.equal(found["columns"], columns)
    answer = guest.bundle()
    answer.put(found["large"].bfloat16().double())
    answer.put(small)
    assert [one.dtype for one in answer.tensors] == [ELSEWHERE, "float32"]
    back = [from_wire(one) for one in host.received(answer.tensors)]
    assert torch.equal(back[0], large.bfloat16().double())
    assert torch.equal(back[1], small)
    assert host.num_passed == 3


def test_a_tensor_that_has_arrived_keeps_its_values(ends: Ends) -> None:
    """A step's description outlives the request that brought it."""
    host, guest = ends
    kept = []
    for seed in range(40):
        bundle = begun(host)
        bundle.put(tensor(3 * MIN_BYTES, seed))
        (found,) = guest.received(sent(bundle, host))
        kept.append(from_wire(found))
        host.received(guest.bundle().tensors)
    assert all(torch.equal(one, tensor(3 * MIN_BYTES, seed)) for seed, one in enumerate(kept))
    assert host.num_passed == 40


def test_parts_of_a_step_are_under_way_at_once_and_what_finds_no_room_goes_with_its_message(
    ends: Ends,
) -> None:
    host, guest = ends
    requests = []
    for seed in range(6):
        bundle = begun(host)
        bundle.put(tensor(2 * MIN_BYTES, seed))
        requests.append(sent(bundle, host))
    beside = [one[0].dtype == ELSEWHERE for one in requests]
    assert beside == [True] * 4 + [False] * 2
    answers = []
    for seed, request in enumerate(requests):
        (found,) = guest.received(request)
        assert torch.equal(from_wire(found), tensor(2 * MIN_BYTES, seed))
        answer = guest.bundle()
        answer.put(from_wire(found) + 1)
        answers.append(answer.tensors)
    assert [one[0].dtype == ELSEWHERE for one in answers] == [True] * 2 + [False] * 4
    for seed, answered in enumerate(answers):
        (back,) = host.received(answered)
        assert torch.equal(from_wire(back), tensor(2 * MIN_BYTES, seed) + 1)
    bundle = begun(host)
    bundle.put(tensor(2 * MIN_BYTES))
    assert bundle.tensors[0].dtype == ELSEWHERE, "all of it is free again"


def test_a_bundle_that_is_never_sent_takes_no_room(ends: Ends) -> None:
    host, _ = ends
    for _ in range(30):
        bundle = begun(host)
        bundle.put(tensor(3 * MIN_BYTES))
        assert bundle.tensors[0].dtype == ELSEWHERE


def place(offset: int, dtype: str, *shape: int) -> Tensor:
    return told(("at", offset, dtype, shape))


def told(said: object) -> Tensor:
    data = np.frombuffer(msgspec.msgpack.encode(said), np.uint8)
    return Tensor(ELSEWHERE, (data.size,), data)


HALF = LANE_BYTES // 2


@pytest.mark.parametrize(
    "wrong",
    [
        [place(HALF, "uint8", 1)],
        [place(HALF - 256, "uint8", 257)],
        [place(1, "uint8", 1)],
        [place(0, "uint8", 2**40, 2**40)],
        [place(0, "load", 1)],
        [told(["at", -1, "uint8", [1]])],
        [told("nothing")],
        [told(("room", HALF - 256, 256))],
        [told(("room", HALF, HALF + 1))],
        [told(("room", HALF, 256)), place(0, "uint8", 1)],
    ],
)
def test_a_guest_refuses_places_that_make_no_sense(ends: Ends, wrong: list[Tensor]) -> None:
    with pytest.raises(ProtocolError):
        ends[1].received(wrong)


def test_a_host_reads_only_where_the_answer_was_given_room(ends: Ends) -> None:
    host, _ = ends
    for wrong in (place(0, "uint8", 1), place(HALF + 7 * MIN_BYTES, "uint8", 1), told([])):
        bundle = begun(host)
        bundle.put(tensor(MIN_BYTES))
        host.sent()
        with pytest.raises(ProtocolError):
            host.received([wrong])


def test_what_a_request_leaves_unsent_is_no_part_of_those_under_way(ends: Ends) -> None:
    host, guest = ends
    first = begun(host)
    first.put(tensor(3 * MIN_BYTES, 1))
    under_way = sent(first, host)
    begun(host).put(tensor(3 * MIN_BYTES, 2))
    second = begun(host)
    second.put(tensor(3 * MIN_BYTES, 3))
    for seed, request in ((1, under_way), (3, sent(second, host))):
        (found,) = guest.received(request)
        assert torch.equal(from_wire(found), tensor(3 * MIN_BYTES, seed))


def test_a_guest_that_is_gone_is_noticed(ends: Ends) -> None:
    host, guest = ends
    bundle = begun(host)
    guest.close()
    with pytest.raises(TransportError):
        bundle.put(tensor(MIN_BYTES))


def test_a_ring_gives_pieces_that_do_not_overlap() -> None:
    draws = np.random.default_rng(5)
    ring, held = LaneHalf(64 * 256), list[tuple[int, int]]()
    num_full = 0
    for _ in range(3000):
        if held and draws.random() < 0.45:
            ring.give_back()
            held.pop(0)
            continue
        size = int(draws.integers(1, 20 * 256))
        start = ring.take(size)
        if start is None:
            num_full += 1
            assert held
            continue
        assert start % 256 == 0
        assert start + size <= 64 * 256
        assert all(start >= end or start + size <= first for first, end in held)
        held.append((start, start + size))
    assert num_full > 100
    assert gpu_lane.LaneHalf(256).take(257) is None
