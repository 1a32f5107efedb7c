"""Time to first token with a cached prefix, compared with computing the prefix.

``python -m benchmarks prefix-ttft``. Two servers run side by side on the same machine: one without
a store, which computes every prompt, and one whose store has an SSD folder. Prefixes are computed
once and written to the folder; then the server is started again with an empty memory. Each run
sends a prompt whose prefix is on SSD, then another with the same prefix, which is in memory by
then. No engine keeps a cache of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from banaserve.base import models
from banaserve.base.arguments import positive
from banaserve_bench.loadgen.client import CompletionCall, OpenAiClient
from banaserve_bench.loadgen.servers import SHARES_GPU, Server, banaserve_server, wait_until
from banaserve_bench.results import result
from banaserve_bench.results.statistics import paired_ratios
from benchmarks.measurement import (
    Measurement,
    Samples,
    model_of,
    parser_of,
    progress_of,
    random_tokens,
)
from benchmarks.pipeline import model_name
from benchmarks.random_model import SIZES

_BLOCK_TOKENS = 128
_WARM_UP_TOKENS = 400
_FLUSH_TIMEOUT_S = 60.0
_SAME = (
    *("--colocated", "1", "--dtype", "float32", "--no-enable-prefix-caching"),
    *("--block-size", str(_BLOCK_TOKENS)),  # vLLM's own size on a CPU; on a GPU it is another
)
_STORE = ("--kv-store-size", "1536MiB", "--kv-store-ssd-size", "8GiB")


_SHARES = (50, 90)
_CASES = {"0": 0} | {
    f"{percent}_{place}": percent for percent in _SHARES for place in ("ssd", "memory")
}
"""Share of the prompt that is cached, in percent, by share and place of the cache."""
_RECOMPUTE = "recompute"


def main(argv: Sequence[str]) -> int:
    parser = parser_of("prefix-ttft", __doc__)
    parser.add_argument("--model", default=models.PACKAGED)
    parser.add_argument("--size", choices=sorted(SIZES), help="random weights instead of --model")
    parser.add_argument("--runs", type=positive, default=5)
    parser.add_argument("--prompt-tokens", type=int, default=2000)
    parser.add_argument("--folder", type=Path, help="on the disk to measure (default: temporary)")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(list(argv))
    measurement = Measurement("prefix-ttft", given)
    with (
        model_name(given) as model,
        tempfile.TemporaryDirectory(prefix="bench-", dir=given.folder) as folder,
    ):
        ttft_s, counts = asyncio.run(_measure(given, model, Path(folder) / "store"))
    figures = _figures(given, ttft_s, counts)
    measurement.deliver(measurement.result(figures, _notes(given), raw={"counts": counts}))
    return 0


async def _measure(
    given: argparse.Namespace, name: str, folder: Path
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Return times to the first token by case, and the counts of the store's server."""
    found: dict[str, list[float]] = defaultdict(list)
    model = model_of(name)
    draws = random.Random(given.seed)
    prefixes = [
        {
            percent: random_tokens(draws, whole_blocks(given.prompt_tokens, percent))
            for percent in _SHARES
        }
        for _ in range(given.runs)
    ]
    with progress_of(1 + given.runs, "writing prefixes to SSD") as advance:
        with _stored(name, folder) as server:
            await _write(server, model.served_name, [p for run in prefixes for p in run.values()])
        with (
            banaserve_server(name, *_same(), "--no-kv-store") as plain,
            _stored(name, folder) as stored,
        ):
            # First requests take longer; the store's second one reads from memory.
            for server in (plain, stored, stored):
                prompt = random_tokens(random.Random(-1), _WARM_UP_TOKENS)
                await _ttft_s(server, model.served_name, prompt)
            for number, run in enumerate(prefixes):
                advance(f"run {number + 1} of {given.runs}")
                asked = [(case, stored, run.get(percent, [])) for case, percent in _CASES.items()]
                asked.insert(number % 2 * len(asked), (_RECOMPUTE, plain, []))
                for case, server, prefix in asked:
                    rest = random_tokens(draws, given.prompt_tokens - len(prefix))
                    ttft_s = await _ttft_s(server, model.served_name, prefix + rest)
                    found[case].append(ttft_s)
            counts = _counts(stored)
    return found, counts


def _same() -> tuple[str, ...]:
    """Return the options of both servers, which share a GPU if there is one."""
    return (*_SAME, *SHARES_GPU) if result.machine().gpu is not None else _SAME


def _stored(model: str, folder: Path) -> AbstractContextManager[Server]:
    return banaserve_server(model, *_same(), *_STORE, "--kv-store-ssd", str(folder))


def whole_blocks(num_tokens: int, percent: int) -> int:
    """Return the tokens of the whole blocks nearest to ``percent`` of a prompt, the kept ones."""
    return round(num_tokens * percent / 100 / _BLOCK_TOKENS) * _BLOCK_TOKENS


async def _write(server: Server, model: str, prefixes: list[list[int]]) -> None:
    """Compute prefixes and wait until all their blocks are on SSD."""
    for prefix in prefixes:
        await _ttft_s(server, model, prefix)
    blocks = sum(len(prefix) for prefix in prefixes) // _BLOCK_TOKENS
    wait_until(
        lambda: server.metric("banaserve_kvstore_tier_stores_total", tier="ssd") >= blocks,
        _FLUSH_TIMEOUT_S,
        f"not all of {blocks} blocks were on SSD after {_FLUSH_TIMEOUT_S:.0f} s",
    )


async def _ttft_s(server: Server, model: str, prompt: list[int]) -> float:
    # By token ids: with random weights the first token may have no text.
    async with OpenAiClient(server.url, model, return_token_ids=True) as client:
        record = await client.send(CompletionCall("one", prompt=prompt, max_tokens=1))
    ttft_s = record.checked().ttft_s
    assert ttft_s is not None
    return ttft_s


def _counts(stored: Server) -> dict[str, float]:
    names = (
        "promoted_blocks",
        "promotion_wait_seconds",
        "promotion_predicted_seconds",
        "tier_declined_blocks",
        "declined_blocks",
        "loaded_blocks",
        "load_wait_seconds",
        "predicted_fetch_seconds",
        "measured_fetch_seconds",
        "predicted_compute_seconds",
        "measured_compute_seconds",
        "avoided_compute_seconds",
    )
    counts = {name: stored.metric(f"banaserve_{name}_total") for name in names}
    for kind in ("fetch", "cut", "compute", "unmeasured", "probe"):
        counts[f"decided_{kind}"] = stored.metric("banaserve_fetch_decisions_total", kind=kind)
    for kind in ("arrived", "failed", "late", "abandoned"):
        counts[f"promotion_{kind}"] = stored.metric("banaserve_promotions_total", kind=kind)
    return counts


def _notes(given: argparse.Namespace) -> list[str]:
    return [
        "ttft_vs_recompute compares with a server without a store, run by run",
        "the cached share is whole blocks: "
        + ", ".join(f"{whole_blocks(given.prompt_tokens, p)} tokens" for p in _SHARES),
        "ssd_blocks_fraction: of the blocks that lay on SSD only, so many came from there",
        "the page cache is bypassed where the folder's file system has direct I/O",
        "float32, one OMP thread an engine, one request at a time",
    ]


def _figures(
    given: argparse.Namespace, ttft_s: dict[str, list[float]], counts: dict[str, float]
) -> Samples:
    """Return samples and unit of each figure."""
    recompute_s = ttft_s[_RECOMPUTE]
    figures = {f"ttft_{name}": (samples, "s") for name, samples in ttft_s.items()}
    for case in _CASES:
        ratios = paired_ratios(ttft_s[case], recompute_s)
        figures[f"ttft_vs_recompute_{case}"] = (ratios, "ratio")
    # One prefix of each share is fetched from SSD in a run.
    expected = given.runs * sum(
        whole_blocks(given.prompt_tokens, percent) // _BLOCK_TOKENS for percent in _SHARES
    )
    figures["ssd_blocks_fraction"] = ([counts["promoted_blocks"] / expected], "fraction")
    return figures
