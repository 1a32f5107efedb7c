"""A server on a GPU that computes nothing, as a user starts it, and streams that it answers."""

from __future__ import annotations

import json
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import environment_files
from ports import free_port
from waiting import eventually

START_S = 900.0
"""Longest start: a machine of two cores compiles vLLM's Triton kernels for the first time."""


@dataclass(frozen=True)
class Setup:
    """Choices of a server.

    Attributes:
        size: Size of the random weights, as ``benchmarks.random_model`` names it.
        graphs: True if vLLM captures CUDA graphs, as it does by default.
        runner: Model runner of vLLM, 1 or 2.
        ranks: Tensor-parallel ranks of each instance, each on a GPU of its own.
    """

    size: str = "tiny"
    graphs: bool = False
    runner: int = 1
    ranks: int = 1

    @property
    def name(self) -> str:
        graphs = "graphs" if self.graphs else "eager"
        return f"{self.size}-{graphs}-runner{self.runner}-tp{self.ranks}"

    @property
    def variables(self) -> dict[str, str]:
        layout = {} if self.runner == 2 else {"VLLM_KV_CACHE_LAYOUT": "LBHNC"}
        runner = {"VLLM_USE_V2_MODEL_RUNNER": str(self.runner - 1)}
        return {**environment_files.variables(self.ranks), **layout, **runner}

    def options(self, model: str, port: int, run_dir: Path) -> list[str]:
        shared = ",".join(map(str, range(self.ranks)))
        return [
            *("--model", model, "--served-model-name", "m", "--port", str(port)),
            *("--pd", "1:1", "--migration", "on", "--devices", f"{shared};{shared}"),
            # A guest compiles kernels in its first step, on a processor that computes for all.
            *("--migration-stall", "30"),
            *("--run-dir", str(run_dir), "--dtype", "bfloat16", "--max-model-len", "2048"),
            *("--kv-cache-memory-bytes", str(256 << 20), "--gpu-memory-utilization", "0.4"),
            *(("--tensor-parallel-size", str(self.ranks)) if self.ranks > 1 else ()),
            *(() if self.graphs else ("--enforce-eager",)),
        ]


@dataclass(frozen=True)
class NullServer:
    """A server that runs, or the line with which it ended.

    Attributes:
        url: Address of the server; empty if it did not start.
        refusal: Last line that it printed; empty if it runs.
    """

    setup: Setup
    url: str
    run_dir: Path
    refusal: str = ""

    def complete(self, num_tokens: int) -> int:
        """Return how many tokens a completion of that many has."""
        asked = {"model": "m", "prompt": list(range(100, 300)), "max_tokens": num_tokens}
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            json.dumps({**asked, "temperature": 0, "ignore_eos": True}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=START_S) as answer:
            return int(json.load(answer)["usage"]["completion_tokens"])

    @contextmanager
    def streams(self, num_tokens: int) -> Iterator[list[int]]:
        """Send one request after the other; yield the list of their lengths in tokens."""
        lengths: list[int] = []
        ended = threading.Event()

        def send() -> None:
            while not ended.is_set():
                lengths.append(self.complete(num_tokens))

        thread = threading.Thread(target=send)
        thread.start()
        try:
            eventually(lambda: lengths, "the first answer", START_S)
            yield lengths
        finally:
            ended.set()
            thread.join()


@contextmanager
def started(setup: Setup, model: str, folder: Path) -> Iterator[NullServer]:
    """Start a server; yield it when it answers or has ended."""
    log_path = folder / f"{setup.name}.log"
    port = free_port()
    run_dir = folder / setup.name
    command = [str(environment_files.PYTHON), "-m", "banaserve", "serve"]
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [*command, *setup.options(model, port, run_dir)],
            stdout=log,
            stderr=log,
            cwd=environment_files.ROOT,
            env=setup.variables,
        )
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
        except OSError:
            return False
        return True

    try:
        eventually(lambda: process.poll() is not None or answers(), f"see {log_path}", START_S)
        if process.poll() is None:
            yield NullServer(setup, url, run_dir)
        else:
            lines = log_path.read_text(errors="replace").strip().splitlines()
            yield NullServer(setup, "", run_dir, lines[-1] if lines else "it said nothing")
    finally:
        process.terminate()
        process.wait(60)
