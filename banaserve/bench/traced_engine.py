"""A store and an engine beside it that say when each layer was fetched, computed and saved."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import Any

from banaserve.bench.told_engine import ToldEngine, told_engine
from banaserve.errors import UserError

_LOAD, _LOADED, _WAIT, _WAITED, _ATTENDED, _SAVE, _SAVED = range(7)


@dataclass(frozen=True, slots=True)
class PrefillTimes:
    """One prompt's forward pass, in seconds.

    Attributes:
        step_s: From its beginning until everything was saved and committed.
        fetch_s: All layers' fetches.
        store_s: All layers' saves.
        fetch_wait_s: How long the forward pass waited for fetches.
        store_wait_s: How long saves went on after the forward pass.
        compute_s: The forward pass without waiting.
        layers: ``[num_layers][7]``: the trace, in seconds from the step's beginning.
    """

    step_s: float
    fetch_s: float
    store_s: float
    fetch_wait_s: float
    store_wait_s: float
    compute_s: float
    layers: list[list[float | None]]

    @property
    def transfer_s(self) -> float:
        return self.fetch_s + self.store_s

    @property
    def visible_s(self) -> float:
        return self.fetch_wait_s + self.store_wait_s


class TracedEngine:
    """Answers one prompt at a time.

    Attributes:
        block_size: Tokens a block.
        num_layers: Layers that have a KV cache.
        token_layer_bytes: Of K and V of one token in one layer.
    """

    def __init__(self, engine: ToldEngine) -> None:
        self._engine = engine
        kind = engine.greeting
        self.block_size = int(kind["block_size"])
        self.num_layers = int(kind["num_layers"])
        self.token_layer_bytes = int(kind["page_bytes"]) // self.block_size

    def prefill(self, prompt: Sequence[int], **options: Any) -> PrefillTimes:
        """Compute ``prompt`` with the connector's options changed to ``options``."""
        steps = self._engine.tell(prompt=list(prompt), **options)["steps"]
        if len(steps) != 1:
            raise UserError(f"a prompt took {len(steps)} steps that moved blocks, not one")
        return times_of(steps[0])


def times_of(step: dict[str, Any]) -> PrefillTimes:
    """What a step's trace says."""
    layers: list[list[float]] = step["layers"]
    began_s, forward_s = step["began_s"], step["forward_s"]
    loads = [layer for layer in layers if not isnan(layer[_LOAD])]
    first_load_s = min((layer[_LOAD] for layer in loads), default=forward_s)
    fetch_wait_s = max(0.0, forward_s - first_load_s)
    fetch_wait_s += sum(layer[_WAITED] - layer[_WAIT] for layer in layers)
    saves = [layer for layer in layers if not isnan(layer[_SAVE])]
    return PrefillTimes(
        step_s=step["ended_s"] - began_s,
        fetch_s=sum(layer[_LOADED] - layer[_LOAD] for layer in loads),
        store_s=sum(layer[_SAVED] - layer[_SAVE] for layer in saves),
        fetch_wait_s=fetch_wait_s,
        store_wait_s=step["ended_s"] - step["computed_s"],
        compute_s=step["computed_s"] - began_s - fetch_wait_s,
        layers=[[None if isnan(at) else at - began_s for at in layer] for layer in layers],
    )


@contextlib.contextmanager
def traced_engine(model_path: str, store_size: str) -> Iterator[TracedEngine]:
    """A store of ``store_size`` and an engine over it, both ended at the end.

    Raises:
        UserError: One of them did not start; says why.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        socket = folder / "store.sock"
        stack.enter_context(_store(socket, store_size))
        module = "banaserve.engine.vllm.traced"
        engine = stack.enter_context(told_engine(module, model_path, str(socket)))
        yield TracedEngine(engine)


@contextlib.contextmanager
def _store(socket: Path, size: str) -> Iterator[None]:
    readable, writable = os.pipe()
    command = [sys.executable, "-m", "banaserve.kvstore.daemon", "--die-with-parent"]
    command += ["--socket", str(socket), "--size", size, "--ready-fd", str(writable)]
    with subprocess.Popen(command, pass_fds=[writable], stderr=subprocess.DEVNULL) as process:
        os.close(writable)
        with os.fdopen(readable) as pipe:
            ready = pipe.readline()
        if not ready:
            raise UserError("the KV cache store did not start: is there memory for it?")
        try:
            yield
        finally:
            process.terminate()
