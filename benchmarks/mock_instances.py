"""Front door of 200 mock instances: its start, its streams, a rolling restart and a scale-down.

``python -m benchmarks mock-instances``. Engine cores are mocks (``tests/mock_engine``) that speak
vLLM's protocol and compute nothing, so the figures are those of the front door: its time, memory
and CPU time per instance, and the number of streams lost while instances are replaced and removed.
Every answer is compared with the reference answer to the same prompt, given without other load.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import re
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

from banaserve.base import models
from banaserve.base.arguments import positive
from banaserve.base.net.sockets import raise_descriptor_limit
from banaserve.base.platform.run_dir import find_admin
from banaserve.contracts.control_api import ScaleRequest
from banaserve.contracts.restart_api import RestartRequest
from banaserve.frontdoor.admin_client import AdminClient, Ask, OperationClient
from banaserve_bench.loadgen.client import CompletionCall, OpenAiClient, RequestRecord
from banaserve_bench.loadgen.servers import Server, command_server
from benchmarks.location import ROOT
from benchmarks.measurement import Measurement, parser_of, with_units

_MOCKS = ROOT / "tests" / "mock_engine"
_FEW = 2
_IDLE_S = 5.0
_NUM_PROMPTS = 64
_PROMPT_TOKENS = 300
_CHANGE_S = 1800.0
_TIMED = re.compile(r"\[ *([0-9.]+) s\] (.*)")
_NOTES = (
    "engine cores are mocks that compute nothing: no figure says anything of engines",
    "client, front door, store and cores share the processors of one machine",
    f"memory an instance: beside a server of {_FEW} instances",
)
_UNITS = {
    "_per_s": "1/s",
    "_fraction": "ratio",
    "_mb": "MB",
    "_streams": "count",
    "_lost": "count",
    "_s": "s",
}
MockSamples = dict[str, list[float]]
"""Samples by figure, one for each run."""


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and write the result; return 1 if a stream was lost or wrong."""
    parser = parser_of("mock-instances", __doc__)
    parser.add_argument("--runs", type=positive, default=5)
    parser.add_argument("--instances", type=positive, default=200)
    parser.add_argument("--streams", type=positive, default=3000)
    parser.add_argument("--concurrency", type=positive, default=128)
    parser.add_argument("--tokens", type=positive, default=32)
    parser.add_argument("--step-ms", type=float, default=20.0)
    given = parser.parse_args(list(argv))
    raise_descriptor_limit()
    measurement, samples = Measurement("mock-instances", given), defaultdict[str, list[float]](list)
    for number in range(given.runs):
        _run(given, samples)
        shown = {name: round(found[-1], 3) for name, found in samples.items()}
        print(f"run {number}: {shown}", flush=True)
    lost = sum(sum(samples[f"{name}_lost"]) for name in ("load", "restart", "scale_down"))
    measurement.deliver(measurement.result(with_units(samples, _UNITS), _NOTES))
    return int(lost > 0)


@contextlib.contextmanager
def _served(num: int, step_ms: float) -> Iterator[tuple[Server, AdminClient, float]]:
    """Yield a server of ``num`` mock instances, its admin API and the seconds of their start."""
    os.environ["PYTHONPATH"] = str(_MOCKS)
    os.environ["BANASERVE_MOCK_CORES"] = f'{{"step_ms": {step_ms}}}'
    prefill = max(1, num // 4)
    with tempfile.TemporaryDirectory(prefix="mock-") as folder:
        command = [sys.executable, "-P", str(_MOCKS / "mock_serve.py"), "serve"]
        command += ["--model", models.PACKAGED, "--pd", f"{prefill}:{num - prefill}"]
        command += ["--kv-store-size", "64MiB", "--run-dir", folder, "--log-level", "WARNING"]
        with command_server(command, "banaserve") as server:
            yield server, AdminClient(*find_admin(Path(folder))), _start_s(server)


def _start_s(server: Server) -> float:
    """Return seconds from the start of the first engine until the last engine was ready.

    Imports of vLLM come before; they take as long for one instance.
    """
    lines = [_TIMED.match(line) for line in server.log_path.read_text().splitlines()]
    times = {line[2]: float(line[1]) for line in lines if line is not None}
    ready = max(at for words, at in times.items() if words.endswith("is ready"))
    return ready - next(at for words, at in times.items() if words.startswith("starting inst"))


def _run(given: argparse.Namespace, samples: MockSamples) -> None:
    with _served(_FEW, given.step_ms) as (server, _, _):
        few_mb = server.front_memory_bytes() / 1e6
    with _served(given.instances, given.step_ms) as (server, admin, start_s):
        more = given.instances - _FEW
        samples["ready_s"].append(start_s)
        samples["front_mb"].append(server.front_memory_bytes() / 1e6)
        samples["front_each_mb"].append((samples["front_mb"][-1] - few_mb) / more)
        samples["core_mb"].append(_core_bytes(server) / 1e6)
        began_s = server.front_cpu_s()
        time.sleep(_IDLE_S)
        samples["idle_cpu_fraction"].append((server.front_cpu_s() - began_s) / _IDLE_S)
        asyncio.run(_under_load(given, server, admin, samples))


def _core_bytes(server: Server) -> float:
    """Return the memory that one mock core has for itself, in bytes."""
    cores = [one for one in server.processes() if "mock_parent" in one.cmdline()][1:]
    return statistics.median(one.memory_full_info().uss for one in cores[:20])


async def _under_load(
    given: argparse.Namespace, server: Server, admin: AdminClient, samples: MockSamples
) -> None:
    load = ComparedStreams(server.url, given.tokens)
    async with load.connected():
        await load.learn()
        began_s, cpu_s = time.monotonic(), server.front_cpu_s()
        await load.until(given.concurrency, lambda: load.num_done >= given.streams)
        took_s = time.monotonic() - began_s
        samples["streams_per_s"].append(load.num_done / took_s)
        samples["tokens_per_s"].append(load.num_done * given.tokens / took_s)
        samples["load_cpu_fraction"].append((server.front_cpu_s() - cpu_s) / took_s)
        _count(samples, "load", load)
        restarting = asyncio.to_thread(_done_s, admin.restarts, RestartRequest())
        samples["restart_s"].append(await load.beside(given.concurrency, restarting))
        _count(samples, "restart", load)
        prefill = max(1, given.instances // 8)
        ask = ScaleRequest(prefill, given.instances // 2 - prefill)
        scaling = asyncio.to_thread(_done_s, admin.scalings, ask)
        samples["scale_down_s"].append(await load.beside(given.concurrency, scaling))
        _count(samples, "scale_down", load)


def _count(samples: MockSamples, what: str, load: ComparedStreams) -> None:
    samples[f"{what}_streams"].append(load.num_done)
    samples[f"{what}_lost"].append(len(load.lost))
    for line in load.lost[:3]:
        print(f"{what}: {line}", flush=True)
    load.num_done, load.lost = 0, []


def _done_s(operations: OperationClient[Ask, Any], ask: Ask) -> float:
    """Return the seconds that an operation takes. Blocking."""
    began_s = time.monotonic()
    state = operations.begin(ask)
    while state.is_open and time.monotonic() < began_s + _CHANGE_S:
        state = operations.show(state.id, wait_s=20.0)
    assert state.state == "done", state
    return time.monotonic() - began_s


class ComparedStreams:
    """Streams of a closed loop, each compared with the reference answer to its prompt.

    Attributes:
        num_done: Number of streams that have ended since the last count.
        lost: A line for each stream that failed or differed from the reference answer.
    """

    def __init__(self, url: str, num_tokens: int) -> None:
        self._url = url
        self._num_tokens = num_tokens
        self._expected: list[list[int]] = []
        self._numbers = itertools.count()
        self.num_done = 0
        self.lost: list[str] = []

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        async with OpenAiClient(self._url, models.PACKAGED, return_token_ids=True) as self._client:
            yield

    async def learn(self) -> None:
        """Get the reference answer to each prompt, in sequence."""
        for number in range(_NUM_PROMPTS):
            record = await self._ask(number)
            assert record.error is None, record.error
            self._expected.append(record.token_ids)
        assert len({tuple(one) for one in self._expected}) == _NUM_PROMPTS

    async def until(self, concurrency: int, is_over: Callable[[], bool]) -> None:
        """Keep ``concurrency`` streams under way until ``is_over``, then let them end."""

        async def ask_on() -> None:
            while not is_over():
                await self._check(next(self._numbers) % _NUM_PROMPTS)

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(ask_on())

    async def beside(self, concurrency: int, change: Coroutine[None, None, float]) -> float:
        """Keep streams under way while a change is made; return the seconds of the change."""
        changing = asyncio.create_task(change)
        await self.until(concurrency, changing.done)
        return changing.result()

    async def _check(self, number: int) -> None:
        record = await self._ask(number)
        self.num_done += 1
        if record.error is not None:
            self.lost.append(record.error)
        elif record.token_ids != self._expected[number]:
            self.lost.append(f"prompt {number} has {record.token_ids}")

    async def _ask(self, number: int) -> RequestRecord:
        prompt = [1000 + number, *range(2000, 2000 + _PROMPT_TOKENS)]
        name = f"{number}-{next(self._numbers)}"
        return await self._client.send(CompletionCall.exact(name, prompt, self._num_tokens))
