"""Number of uncached tokens from which a prefill leg is worth its cost.

``python -m benchmarks short-prompts``. Two servers at ``--pd 1:1`` get the same prompts: one gives
every prompt a prefill leg, the other none. A prefill leg costs a pass over the weights; a prompt
that the decode instance computes itself delays the streams of that instance. Both are measured,
length by length, for the default of ``--skip-prefill-below-tokens``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from rich.progress import Progress

from banaserve.base import models
from banaserve.base.arguments import Parser, positive
from banaserve_bench.loadgen.client import CompletionCall, OpenAiClient
from banaserve_bench.loadgen.servers import Server, banaserve_server, end_on_sigterm
from banaserve_bench.results import result
from banaserve_bench.statistics import median

_LENGTHS = (8, 16, 32, 64, 128, 256)
_NUM_STREAMS = 4
_STREAM_TOKENS = 40
_ALWAYS, _NEVER = "0", "1000000"


class PromptSample(NamedTuple):
    """Results of one short prompt among running streams, in seconds."""

    ttft_s: float
    longest_gap_s: float
    cpu_s: float


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and write the result; return the exit code."""
    parser = Parser(prog="python -m benchmarks short-prompts", description=__doc__)
    parser.add_argument("--json", type=Path, help="write the result there")
    parser.add_argument("--runs", type=positive, default=5)
    given = parser.parse_args(list(argv))
    end_on_sigterm()
    record = asyncio.run(_measure(given.runs, datetime.now(UTC)))
    result.deliver(record, given.json)
    return 0


async def _measure(runs: int, started_at: datetime) -> result.Result:
    model = models.resolve(models.PACKAGED, None, lambda line: print(line, flush=True))
    option = "--skip-prefill-below-tokens"
    samples: dict[tuple[str, int], list[PromptSample]] = {}
    with (
        Progress(transient=True) as progress,
        banaserve_server(models.PACKAGED, "--pd", "1:1", option, _ALWAYS) as apart,
        banaserve_server(models.PACKAGED, "--pd", "1:1", option, _NEVER) as together,
    ):
        task = progress.add_task("short prompts", total=(runs + 1) * 2 * len(_LENGTHS))
        for run in range(runs + 1):  # the first warms up
            for length in _LENGTHS:
                for name, server in (("two_legs", apart), ("one_leg", together)):
                    sample = await _sample(server, model.served_name, length, run)
                    if run:
                        samples.setdefault((name, length), []).append(sample)
                    progress.advance(task)
    return _result(runs, started_at, samples)


async def _sample(server: Server, model: str, length: int, run: int) -> PromptSample:
    async with OpenAiClient(server.url, model, return_token_ids=True) as client:
        began_cpu_s = server.cpu_s()
        streams = [
            asyncio.create_task(client.send(_call(f"stream-{i}", 8, _STREAM_TOKENS, i, run)))
            for i in range(_NUM_STREAMS)
        ]
        await client.clock.sleep(1.0)
        sent_s = client.clock.now()
        short = (await client.send(_call("short", length, 1, length * 1000, run))).checked()
        records = [(await stream).checked() for stream in streams]
        cpu_s = server.cpu_s() - began_cpu_s
    assert short.ttft_s is not None
    gaps = [
        later - earlier
        for record in records
        for earlier, later in zip(record.token_at_s, record.token_at_s[1:], strict=False)
        if later >= sent_s
    ]
    return PromptSample(short.ttft_s, max(gaps, default=0.0), cpu_s)


def _call(name: str, num_tokens: int, max_tokens: int, seed: int, run: int) -> CompletionCall:
    ids = [1000 + (seed * 131 + run * 977 + 37 * i) % 40000 for i in range(num_tokens)]
    return CompletionCall(name, prompt=ids, max_tokens=max_tokens, extra={"ignore_eos": True})


def _result(
    runs: int, started_at: datetime, samples: dict[tuple[str, int], list[PromptSample]]
) -> result.Result:
    figures = {}
    for (name, length), found in sorted(samples.items(), key=lambda item: (item[0][1], item[0][0])):
        for i, unit in enumerate(PromptSample._fields):
            values = [sample[i] for sample in found]
            figures[f"{name}_{length}_{unit.removesuffix('_s')}"] = result.figure(values, "s")
    pays_from = next(
        (n for n in _LENGTHS if _cost_s(samples["two_legs", n]) <= _cost_s(samples["one_leg", n])),
        _LENGTHS[-1],
    )
    figures["pays_from"] = result.figure([pays_from], "tokens")
    return result.result(
        "short-prompts",
        seed=0,
        options={"runs": runs, "streams": _NUM_STREAMS},
        started_at=started_at,
        figures=figures,
        notes=[
            f"{_NUM_STREAMS} streams decode while one prompt of the given length arrives",
            "pays_from: shortest length at which time to first token plus the longest gap of the "
            "streams, by their medians, is no longer with two legs than with one",
        ],
    )


def _cost_s(samples: list[PromptSample]) -> float:
    return median([s.ttft_s for s in samples]) + median([s.longest_gap_s for s in samples])
