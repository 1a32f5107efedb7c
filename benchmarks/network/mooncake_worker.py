"""One side of Mooncake Store in the network benchmark, on its own host.

``python -m benchmarks.network.mooncake_worker lend|read MASTER_HOST BLOCK_BYTES NUM_BLOCKS RUNS
HOST`` prints a line of JSON when it is ready, and one for each number that it reads: the blocks of
that run have been stored, or read. It lends memory for all runs, since recently read blocks stay.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from banaserve.base.errors import UserError
from banaserve_bench.loadgen.servers import end_with_parent
from benchmarks.kvstore.memory import Memory, plain_memory

MASTER_PORT = 7400
_START_S = 2.0


def main(argv: Sequence[str]) -> int:
    """Serve until standard input ends; return the exit code."""
    part, master_host, block_bytes, num_blocks, runs, host = argv
    lends = part == "lend"
    if lends:
        _start_master(master_host)
    shape = (int(num_blocks), int(block_bytes))
    blocks = plain_memory(shape[0] * shape[1], 0 if lends else None).reshape(shape)
    segment_bytes = (int(runs) + 1) * blocks.nbytes if lends else 0
    store = _Mooncake(f"{master_host}:{MASTER_PORT}", blocks, host, segment_bytes)
    _say(0.0)
    for line in sys.stdin:
        keys = [f"network-{int(line)}-{number}" for number in range(shape[0])]
        began_s = time.perf_counter()
        if lends:
            blocks[:, 0] = int(line) % 251
            store.put(keys, blocks)
        else:
            store.get(keys, blocks)
            if (blocks[:, 0] != int(line) % 251).any():
                raise UserError("Mooncake returned other bytes")
        _say(time.perf_counter() - began_s)
    return 0


class _Mooncake:
    """Client of Mooncake, reached by others at ``host``, which lends ``segment_bytes``."""

    def __init__(self, master: str, blocks: Memory, host: str, segment_bytes: int) -> None:
        # Imported by name, since the package is an extra.
        package = importlib.import_module("mooncake.store")
        self._client: Any = package.MooncakeDistributedStore()
        code = self._client.setup(host, "P2PHANDSHAKE", segment_bytes, 16 << 20, "tcp", "", master)
        code = code or self._client.register_buffer(blocks.ctypes.data, blocks.nbytes)
        if code:
            raise UserError(f"Mooncake's client cannot be set up (code {code})")

    def put(self, keys: Sequence[str], blocks: Memory) -> None:
        codes = self._client.batch_put_from(list(keys), _addresses(blocks), _sizes(blocks))
        if any(codes):
            raise UserError(f"Mooncake stored nothing (codes {sorted(set(codes))})")

    def get(self, keys: Sequence[str], blocks: Memory) -> None:
        codes = self._client.batch_get_into(list(keys), _addresses(blocks), _sizes(blocks))
        if codes != _sizes(blocks):
            raise UserError(f"Mooncake loaded something else (codes {sorted(set(codes))})")


def _addresses(blocks: Memory) -> list[int]:
    return [ctypes.addressof(ctypes.c_char.from_buffer(block)) for block in blocks]


def _sizes(blocks: Memory) -> list[int]:
    return [block.size for block in blocks]


def _start_master(host: str) -> None:
    spec = find_spec("mooncake")
    assert spec is not None
    assert spec.origin is not None
    command = [str(Path(spec.origin).with_name("mooncake_master")), f"--rpc_port={MASTER_PORT}"]
    command += [f"--rpc_address={host}", "--rpc_thread_num=2", f"--metrics_host={host}"]
    subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=end_with_parent,
    )
    time.sleep(_START_S)


def _say(seconds: float) -> None:
    print(json.dumps({"seconds": seconds}), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
