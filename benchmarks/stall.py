"""Gaps in the streams of others while a very long prompt is tokenised and hashed.

``python -m benchmarks stall``. Sixteen streams run while prompts of 30,000 tokens arrive, sent as
text. The figure is the longest gap between two tokens of any stream around each arrival, compared
with the longest gap without an arrival.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from banaserve.base import models
from banaserve.base.arguments import Parser, positive
from banaserve_bench.datasets import prompts
from banaserve_bench.loadgen.client import CompletionCall, OpenAiClient, RequestRecord
from banaserve_bench.loadgen.servers import banaserve_server, end_on_sigterm
from banaserve_bench.results import result
from banaserve_bench.statistics import median

_WINDOW_S = 1.5
_CONTEXT_TOKENS = 40_000


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and write the result; return the exit code."""
    parser = Parser(prog="python -m benchmarks stall", description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--runs", type=positive, default=5)
    parser.add_argument("--streams", type=positive, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=30_000)
    given = parser.parse_args(list(argv))
    end_on_sigterm()
    record = asyncio.run(_measure(given, datetime.now(UTC)))
    result.deliver(record, given.json)
    return 0


async def _measure(given: argparse.Namespace, started_at: datetime) -> result.Result:
    model = models.resolve(models.PACKAGED, None, lambda line: print(line, flush=True))
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model.path_or_id)

    def tokenize(text: str) -> list[int]:
        return list(tokenizer(text, verbose=False)["input_ids"])

    length = given.prompt_tokens
    long = prompts.prompts("synthetic", given.runs, length - 50, length, 1, tokenize)
    short = prompts.prompts("synthetic", given.streams, 40, 60, 2, tokenize)
    overrides = json.dumps({"max_position_embeddings": _CONTEXT_TOKENS})
    options = ["--max-model-len", str(_CONTEXT_TOKENS), "--hf-overrides", overrides]
    options += ["--kv-store-size", "2GiB", "--max-num-batched-tokens", "512"]
    options += ["--kv-cache-memory-bytes", str(5 << 29)]
    with banaserve_server(models.PACKAGED, "--pd", "1:1", *options) as server:
        async with OpenAiClient(server.url, model.served_name, return_token_ids=True) as client:
            calm, disturbed = await _gaps(client, short, long)
    return result.result(
        "stall",
        seed=1,
        options={"runs": given.runs, "streams": given.streams, "prompt_tokens": length},
        started_at=started_at,
        figures={
            "longest_gap_calm": result.figure(calm, "s"),
            "longest_gap_disturbed": result.figure(disturbed, "s"),
            "gap_ratio": result.figure([d / median(calm) for d in disturbed], "ratio"),
        },
        notes=[
            f"longest gap between two tokens of any stream within {_WINDOW_S} s",
            "the long prompt is cancelled after that window; its prefill competes for the cores",
        ],
    )


async def _gaps(
    client: OpenAiClient,
    short: list[prompts.Prompt],
    long: list[prompts.Prompt],
) -> tuple[list[float], list[float]]:
    calm, disturbed = [], []
    for number, prompt in enumerate(long):
        records: list[RequestRecord] = []
        streams = asyncio.gather(
            *(
                client.send(
                    CompletionCall(
                        str(i),
                        prompt=f"{number} {p.text}",
                        max_tokens=200,
                        extra={"ignore_eos": True},
                    )
                )
                for i, p in enumerate(short)
            )
        )
        await client.clock.sleep(3.0)
        calm_from_s = client.clock.now()
        await client.clock.sleep(_WINDOW_S)
        sent_s = client.clock.now()
        disturber = asyncio.create_task(
            client.send(CompletionCall(f"long-{number}", prompt=prompt.text, max_tokens=1))
        )
        await client.clock.sleep(_WINDOW_S)
        disturber.cancel()
        records = await streams
        calm.append(_longest_gap(records, calm_from_s, sent_s))
        disturbed.append(_longest_gap(records, sent_s, sent_s + _WINDOW_S))
    return calm, disturbed


def _longest_gap(records: list[RequestRecord], from_s: float, to_s: float) -> float:
    gaps = [
        later - earlier
        for record in records
        for earlier, later in zip(record.token_at_s, record.token_at_s[1:], strict=False)
        if from_s <= later and earlier <= to_s
    ]
    return max(gaps)
