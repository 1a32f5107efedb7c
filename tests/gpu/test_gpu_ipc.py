"""Memory of a GPU that two processes share: runs of bytes, and tensors of steps."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
from banaserve.migration.rpc.gpu_lane import MIN_BYTES, HostLane
from banaserve.migration.rpc.tensors import TensorBundle, from_wire, memory_of
from banaserve.transport.backends.cuda_ipc import CudaIpcTransport
from banaserve.transport.errors import PeerGoneError, StaleEpochError
from banaserve.transport.interface import Tensor, TransportOptions
from banaserve.transport.memory import Memory
from banaserve.transport.regions.descriptor import RegionDescriptor

CUDA = torch.device("cuda", 0)
NUM_BYTES = 5 * 2**20 + 123
WAIT_S = 60.0
OTHER = Path(__file__).with_name("gpu_ipc_guest.py")


class Guest:
    """A process that offers memory of the last GPU that it sees."""

    def __init__(self, options: TransportOptions) -> None:
        given = [options.folder, options.secret.hex(), str(torch.cuda.device_count() - 1)]
        self.process = subprocess.Popen(
            [sys.executable, str(OTHER), *given],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, do: str, **given: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"do": do, **given}) + "\n")
        self.process.stdin.flush()
        while not (line := self.process.stdout.readline()).startswith("answer: "):
            assert line, "the guest has died"
        return json.loads(line.removeprefix("answer: "))

    def descriptor(self, do: str, **given: Any) -> RegionDescriptor:
        return msgspec.msgpack.decode(bytes.fromhex(self(do, **given)), type=RegionDescriptor)


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[tuple[CudaIpcTransport, Guest]]:
    options = TransportOptions(folder=str(tmp_path), secret=secrets.token_bytes(32))
    transport, guest = CudaIpcTransport(options), Guest(options)
    yield transport, guest
    transport.close()
    guest.process.kill()
    guest.process.wait()


def random_bytes(num_bytes: int, seed: int) -> torch.Tensor:
    drawn = np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8)
    return torch.from_numpy(drawn)


@pytest.mark.parametrize("kind", ["gpu", "pinned", "pageable"])
def test_runs_go_to_another_process_and_back(
    ends: tuple[CudaIpcTransport, Guest], kind: str
) -> None:
    transport, guest = ends
    remote = transport.open(guest.descriptor("offer", num_bytes=NUM_BYTES), WAIT_S)
    model = torch.zeros(NUM_BYTES, dtype=torch.uint8)
    here = random_bytes(NUM_BYTES, 1)
    local = here.to(CUDA) if kind == "gpu" else here.pin_memory() if kind == "pinned" else here
    torch.cuda.synchronize()
    for run_bytes, ours, theirs in (
        (NUM_BYTES, [0], [0]),
        (1000, [0, 5000, 10_000, 15_000], [0, 1000, 2000, 3000]),
        (4096, [4096 * i for i in (3, 4, 5, 9, 1)], [8192 * i for i in range(5)]),
    ):
        remote.submit_write(memory_of(local), ours, theirs, run_bytes, 1).wait(WAIT_S)
        for to, at in zip(theirs, ours, strict=True):
            model[to : to + run_bytes] = here[at : at + run_bytes]
    assert guest("digest") == digest(model)
    back = torch.zeros_like(local)
    torch.cuda.synchronize()
    remote.submit_read(memory_of(back), [0], [0], NUM_BYTES, 1).wait(WAIT_S)
    assert torch.equal(back.cpu(), model)
    assert guest("advance", epoch=2) == "done"
    with pytest.raises(StaleEpochError):
        remote.submit_read(memory_of(back), [0], [0], NUM_BYTES, 1).wait(WAIT_S)
    remote.close()


def test_a_guest_that_is_killed_is_noticed(ends: tuple[CudaIpcTransport, Guest]) -> None:
    transport, guest = ends
    remote = transport.open(guest.descriptor("offer", num_bytes=NUM_BYTES), WAIT_S)
    guest.process.kill()
    guest.process.wait()
    with pytest.raises(PeerGoneError):
        remote.submit_write(Memory.of(np.zeros(8, np.uint8)), [0], [0], 8, 1).wait(WAIT_S)
    remote.close()


def test_tensors_of_steps_pass_beside_their_messages(
    ends: tuple[CudaIpcTransport, Guest],
) -> None:
    transport, guest = ends
    lane = HostLane(transport.open(guest.descriptor("lane"), WAIT_S), CUDA)
    for seed in range(5):
        lane.begin()
        bundle = TensorBundle(lane.write)
        hidden = random_bytes(4 * MIN_BYTES, seed).to(CUDA).view(torch.int32)
        bundle.put(hidden)
        sent = [*bundle.tensors, *lane.sent()]
        assert all(tensor.data.nbytes < 100 for tensor in sent)
        told = guest("negate", tensors=[[t.dtype, t.shape, t.data.tobytes().hex()] for t in sent])
        answers = [
            Tensor(dtype, tuple(shape), np.frombuffer(bytes.fromhex(data), np.uint8))
            for dtype, shape, data in told
        ]
        (back,) = (from_wire(one) for one in lane.received(answers))
        assert back.device == CUDA
        assert torch.equal(back.cpu(), ~hidden.cpu())
    assert lane.num_passed == 10
    lane.close()


def digest(tensor: torch.Tensor) -> int:
    weights = torch.arange(1, len(tensor) + 1, dtype=torch.int64) % 65_521
    return int((tensor.to(torch.int64) * weights).sum())
