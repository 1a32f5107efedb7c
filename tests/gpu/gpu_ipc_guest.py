"""The other process of the test of shared GPU memory: JSON commands, each answered in a line."""

from __future__ import annotations

import json
import sys
from typing import Any

import msgspec
import numpy as np
import torch

from banaserve.migration.rpc.gpu_lane import GuestLane
from banaserve.migration.rpc.tensors import bytes_of, from_wire
from banaserve.transport.backends.cuda_ipc import CudaIpcTransport
from banaserve.transport.interface import Tensor, TransportOptions


class Guest:
    def __init__(self, folder: str, secret: str, index: str) -> None:
        self.device = torch.device("cuda", int(index))
        torch.cuda.set_device(self.device)
        torch.cuda.synchronize()  # which loads CUDA's runtime
        options = TransportOptions(
            folder=folder, secret=bytes.fromhex(secret), device=self.device.index
        )
        self.transport = CudaIpcTransport(options)

    def offer(self, num_bytes: int) -> str:
        self.region = self.transport.offer(num_bytes, 1)
        return msgspec.msgpack.encode(self.region.descriptor).hex()

    def digest(self) -> int:
        seen = bytes_of(self.region.memory, self.device).cpu().to(torch.int64)
        return int((seen * (torch.arange(1, len(seen) + 1) % 65_521)).sum())

    def advance(self, epoch: int) -> str:
        self.region.advance(epoch, 2.0)
        return "done"

    def lane(self) -> str:
        self.made = GuestLane(self.transport, self.device)
        return msgspec.msgpack.encode(self.made.region.descriptor).hex()

    def negate(self, tensors: list[Any]) -> list[Any]:
        """Answer with the bits of the one tensor inverted; the host computes where it checks."""
        came = [
            Tensor(dtype, tuple(shape), np.frombuffer(bytes.fromhex(data), np.uint8))
            for dtype, shape, data in tensors
        ]
        (found,) = self.made.received(came)
        bundle = self.made.bundle()
        bundle.put((~from_wire(found).cpu()).to(self.device))
        return [[t.dtype, t.shape, t.data.tobytes().hex()] for t in bundle.tensors]


def main() -> None:
    guest = Guest(*sys.argv[1:])
    commands = {
        "offer": guest.offer,
        "digest": guest.digest,
        "advance": guest.advance,
        "lane": guest.lane,
        "negate": guest.negate,
    }
    for line in sys.stdin:
        command = json.loads(line)
        answer = commands[command.pop("do")](**command)  # type: ignore[operator]
        print("answer: " + json.dumps(answer), flush=True)


main()
