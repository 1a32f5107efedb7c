"""Traced engine over a store, each in a process of its own, which answers prompt by prompt."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from banaserve.base.errors import UserError
from banaserve.contracts.environment import ENVIRONMENT
from banaserve_bench.loadgen.servers import end_with_parent, log_folder
from benchmarks.kvstore.memory import store_daemon
from benchmarks.location import environment

_END_S = 20.0


class TracedEngine:
    """Driver of ``benchmarks.drivers.traced``, which answers one prompt at a time.

    Attributes:
        block_size: Number of tokens in a block.
        num_layers: Number of layers that have a KV cache.
        token_layer_bytes: Bytes of K and V of one token in one layer.
    """

    def __init__(self, process: subprocess.Popen[str], log_path: Path) -> None:
        self._process = process
        self._log_path = log_path
        kind = self._read()
        self.block_size = int(kind["block_size"])
        self.num_layers = int(kind["num_layers"])
        self.token_layer_bytes = int(kind["page_bytes"]) // self.block_size

    def prefill(self, prompt: Sequence[int], **options: Any) -> dict[str, Any]:
        """Compute ``prompt`` with the connector's options changed; return the step's trace.

        Raises:
            UserError: The engine has ended, or took several steps.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompt": list(prompt), **options}) + "\n")
        self._process.stdin.flush()
        steps: list[dict[str, Any]] = self._read()["steps"]
        if len(steps) != 1:
            raise UserError(f"a prompt took {len(steps)} steps that moved blocks, not one")
        return steps[0]

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            last = self._log_path.read_text(errors="replace").strip().splitlines()[-1:]
            raise UserError(f"the engine ended: {' '.join(last)}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextlib.contextmanager
def traced_engine(model_path: str, store_size: str) -> Iterator[TracedEngine]:
    """Run a store of ``store_size`` and an engine over it; end both afterwards.

    Raises:
        UserError: One of the two did not start; the message says why.
    """
    with store_daemon(store_size) as store, log_folder() as folder:
        log_path = folder / "engine.log"
        words = ["benchmarks.drivers.traced", model_path, str(store.socket_path)]
        with (
            log_path.open("wb") as log,
            subprocess.Popen(
                [sys.executable, "-m", *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**ENVIRONMENT, "OMP_NUM_THREADS": "1", **environment()},
                preexec_fn=end_with_parent,
            ) as process,
        ):
            try:
                yield TracedEngine(process, log_path)
            finally:
                _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    """Let the process end what it has started; kill it if it does not end."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
