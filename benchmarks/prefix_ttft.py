"""Time to first token with a cached prefix, compared with computing the prefix.

``python -m benchmarks prefix-ttft``. Two servers run side by side on the same machine: one without
a store, which computes every prompt, and one whose store has an SSD folder. Prefixes are computed
once and written to the folder; then the server is started again with an empty memory. Each run
sends a prompt whose prefix is on SSD, then another with the same prefix, which is in memory by
then. No engine keeps a cache of its own.

Then one engine inside a process fetches a prefix over links of several speeds, as multiples of the
speed at which fetching the whole prefix takes as long as computing it: the prefix is fetched,
computed, or cut as the cost gate decides, in turn. ``--only links`` measures this alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import tempfile
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from rich.progress import Progress

from banaserve.base import models
from banaserve.base.arguments import Parser, positive
from banaserve.base.errors import UserError
from banaserve_bench.loadgen.client import CompletionCall, OpenAiClient
from banaserve_bench.loadgen.servers import SHARES_GPU, Server, banaserve_server, end_on_sigterm
from banaserve_bench.results import result
from banaserve_bench.statistics import paired_ratios
from benchmarks.pipeline import model_of, traced_engine
from benchmarks.random_model import SIZES

_Figures = dict[str, tuple[list[float], str]]
_LINK_WARM_UPS = 2
_BLOCK_TOKENS = 128
_FIRST_TOKEN, _LAST_TOKEN = 100, 40_000
_WARM_UP_TOKENS = 400
_FLUSH_TIMEOUT_S = 60.0
_SAME = ("--colocated", "1", "--dtype", "float32", "--no-enable-prefix-caching")
_STORE = ("--kv-store-size", "1536MiB", "--kv-store-ssd-size", "8GiB")


class PrefixCase(NamedTuple):
    """Share of the prompt that is cached, and the place of the cache."""

    percent: int
    place: str

    @property
    def name(self) -> str:
        return f"{self.percent}_{self.place}" if self.percent else "0"


_LINKS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Speeds of links; at 1.0 fetching the prefix takes as long as computing it."""
_LINK_WAYS = ("fetch", "compute", "cut")
_LinkSamples = dict[tuple[float, str], list[tuple[float, int]]]
"""Seconds to the first token and number of fetched blocks, by link and way."""

_SHARES = (50, 90)
_CASES = [
    PrefixCase(0, "nowhere"),
    *(PrefixCase(p, place) for p in _SHARES for place in ("ssd", "memory")),
]
_RECOMPUTE = "recompute"


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and write the result; return the exit code."""
    parser = Parser(prog="python -m benchmarks prefix-ttft", description=__doc__)
    parser.add_argument("--json", type=Path, help="write the result there")
    parser.add_argument("--model", default=models.PACKAGED)
    parser.add_argument("--size", choices=sorted(SIZES), help="random weights instead of --model")
    parser.add_argument("--runs", type=positive, default=5)
    parser.add_argument("--prompt-tokens", type=int, default=2000)
    parser.add_argument("--link-blocks", type=positive, default=7, help="of a prefix over links")
    parser.add_argument("--only", choices=("places", "links"), help="one part (default: both)")
    parser.add_argument("--folder", type=Path, help="on the disk to measure (default: temporary)")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(list(argv))
    end_on_sigterm()
    started_at = datetime.now(UTC)
    figures: _Figures = {}
    raw: dict[str, Any] = {}
    with model_of(given) as model:
        if given.only != "links":
            with tempfile.TemporaryDirectory(prefix="bench-", dir=given.folder) as folder:
                ttft_s, counts = asyncio.run(_measure_places(given, model, Path(folder) / "store"))
            figures |= _figures(given, ttft_s, counts)
            raw["counts"] = counts
        if given.only != "places":
            samples, raw["links"] = _measure_links(given, model)
            figures |= link_figures(samples)
    result.deliver(_result(given, started_at, figures, raw), given.json)
    return 0


async def _measure_places(
    given: argparse.Namespace, name: str, folder: Path
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Return times to the first token by case, and the counts of the store's server."""
    model = models.resolve(name, None, lambda line: print(line, flush=True))
    draws = random.Random(given.seed)
    prefixes = [
        {
            percent: _tokens(draws, whole_blocks(given.prompt_tokens, percent))
            for percent in (50, 90)
        }
        for _ in range(given.runs)
    ]
    with Progress(transient=True) as progress:
        task = progress.add_task("writing prefixes to SSD", total=1 + given.runs)
        with _stored(name, folder) as server:
            await _write(server, model.served_name, [p for run in prefixes for p in run.values()])
        progress.advance(task)
        with (
            banaserve_server(name, *_same(), "--no-kv-store") as plain,
            _stored(name, folder) as stored,
        ):
            bench = _Bench(plain, stored, model.served_name, given.prompt_tokens, draws)
            await bench.warm_up()
            for number, run in enumerate(prefixes):
                progress.update(task, description=f"run {number + 1} of {given.runs}")
                await bench.one_run(run, recompute_first=number % 2 == 0)
                progress.advance(task)
            counts = _counts(stored)
    return bench.ttft_s, counts


def _measure_links(given: argparse.Namespace, name: str) -> tuple[_LinkSamples, dict[str, Any]]:
    """Measure every way over every link once a run, after a warm-up that times computing."""
    model = models.resolve(name, None, lambda line: print(line, flush=True))
    draws = random.Random(given.seed)
    samples: _LinkSamples = {(link, way): [] for link in _LINKS for way in _LINK_WAYS}
    with traced_engine(model.path_or_id, "1GiB") as engine, Progress(transient=True) as progress:
        task = progress.add_task("over links", total=given.runs)
        tokens = given.link_blocks * engine.block_size
        for _ in range(_LINK_WARM_UPS):
            warm = engine.prefill(_tokens(draws, tokens))
        prefix = _tokens(draws, tokens)
        engine.prefill(prefix)
        parity = tokens * engine.token_layer_bytes * engine.num_layers / warm.compute_s
        for _ in range(given.runs):
            # Less than a block after the prefix, so that none of it is in the store next time.
            prompt = prefix + _tokens(draws, engine.block_size // 2)
            tokens_seen = set()
            for (link, way), taken in samples.items():
                is_new = way == _LINK_WAYS[0]
                speed = link * parity
                seen = engine.first_token(prompt, way=way, new_link=is_new, load_bytes_per_s=speed)
                taken.append((seen.ttft_s, seen.fetched_blocks))
                tokens_seen.add(seen.token)
            if len(tokens_seen) > 1:
                raise UserError(f"one prompt got different first tokens: {sorted(tokens_seen)}")
            progress.advance(task)
    return samples, {"bytes_per_s_at_1x": parity}


def _same() -> tuple[str, ...]:
    """Return the options of both servers, which share a GPU if there is one."""
    return (*_SAME, *SHARES_GPU) if result.machine().gpu is not None else _SAME


@contextlib.contextmanager
def _stored(model: str, folder: Path) -> Iterator[Server]:
    with banaserve_server(model, *_same(), *_STORE, "--kv-store-ssd", str(folder)) as server:
        yield server


def whole_blocks(num_tokens: int, percent: int) -> int:
    """Return the tokens of the whole blocks nearest to ``percent`` of a prompt, the kept ones."""
    return round(num_tokens * percent / 100 / _BLOCK_TOKENS) * _BLOCK_TOKENS


def _tokens(draws: random.Random, count: int) -> list[int]:
    return draws.choices(range(_FIRST_TOKEN, _LAST_TOKEN), k=count)


async def _write(server: Server, model: str, prefixes: list[list[int]]) -> None:
    """Compute prefixes and wait until all their blocks are on SSD."""
    for prefix in prefixes:
        await _ttft_s(server, model, prefix)
    blocks = sum(len(prefix) for prefix in prefixes) // _BLOCK_TOKENS
    for _ in range(int(_FLUSH_TIMEOUT_S / 0.1)):
        if server.metric("banaserve_kvstore_tier_stores_total", tier="ssd") >= blocks:
            return
        await asyncio.sleep(0.1)
    raise UserError(f"not all of {blocks} blocks were on SSD after {_FLUSH_TIMEOUT_S:.0f} s")


async def _ttft_s(server: Server, model: str, prompt: list[int]) -> float:
    # By token ids: with random weights the first token may have no text.
    async with OpenAiClient(server.url, model, return_token_ids=True) as client:
        record = await client.send(CompletionCall("one", prompt=prompt, max_tokens=1))
    if record.error is not None or record.ttft_s is None:
        raise UserError(f"a request failed: {record.error}")
    return record.ttft_s


class _Bench:
    """The two servers, and the samples so far."""

    def __init__(
        self, plain: Server, stored: Server, model: str, prompt_tokens: int, draws: random.Random
    ) -> None:
        self._plain = plain
        self._stored = stored
        self._model = model
        self._prompt_tokens = prompt_tokens
        self._draws = draws
        self.ttft_s: dict[str, list[float]] = {
            name: [] for name in (_RECOMPUTE, *(case.name for case in _CASES))
        }

    async def warm_up(self) -> None:
        """Serve first requests, which take longer; the store's second one reads from memory."""
        for server in (self._plain, self._stored, self._stored):
            prompt = _tokens(random.Random(-1), _WARM_UP_TOKENS)
            await _ttft_s(server, self._model, prompt)

    async def one_run(self, prefixes: dict[int, list[int]], recompute_first: bool) -> None:
        """Measure each case once, and the same prompt without a store."""
        if recompute_first:
            await self._sample(_RECOMPUTE, self._plain, [])
        for case in _CASES:
            await self._sample(case.name, self._stored, prefixes.get(case.percent, []))
        if not recompute_first:
            await self._sample(_RECOMPUTE, self._plain, [])

    async def _sample(self, name: str, server: Server, prefix: list[int]) -> None:
        prompt = prefix + _tokens(self._draws, self._prompt_tokens - len(prefix))
        self.ttft_s[name].append(await _ttft_s(server, self._model, prompt))


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


def _result(
    given: argparse.Namespace,
    started_at: datetime,
    figures: _Figures,
    raw: dict[str, Any],
) -> result.Result:
    return result.result(
        "prefix-ttft",
        seed=given.seed,
        options={
            "model": given.size or given.model,
            "runs": given.runs,
            "prompt_tokens": given.prompt_tokens,
            "link_blocks": given.link_blocks,
            "only": given.only,
        },
        started_at=started_at,
        figures={name: result.figure(*values) for name, values in figures.items()},
        notes=[
            "ttft_vs_recompute compares with a server without a store, run by run",
            "the cached share is whole blocks: "
            + ", ".join(f"{whole_blocks(given.prompt_tokens, p)} tokens" for p in _SHARES),
            "ssd_blocks_fraction: of the blocks that lay on SSD only, so many came from there",
            "the page cache is bypassed where the folder's file system has direct I/O",
            "Nx: fetches are held back to N times the speed at which fetching the whole prefix "
            "takes as long as computing it; the prompt has half a block more than the prefix",
            "cut_vs_best: over the shorter of fetch and compute, run by run; the gate knows the "
            "link from the prompt before, of which all was fetched",
            "float32, one OMP thread an engine, one request at a time",
        ],
        raw=raw,
    )


def _figures(
    given: argparse.Namespace, ttft_s: dict[str, list[float]], counts: dict[str, float]
) -> _Figures:
    """Return samples and unit of each figure."""
    recompute_s = ttft_s[_RECOMPUTE]
    figures = {f"ttft_{name}": (samples, "s") for name, samples in ttft_s.items()}
    for case in _CASES:
        ratios = paired_ratios(ttft_s[case.name], recompute_s)
        figures[f"ttft_vs_recompute_{case.name}"] = (ratios, "ratio")
    # One prefix of each share is fetched from SSD in a run.
    expected = given.runs * sum(
        whole_blocks(given.prompt_tokens, percent) // _BLOCK_TOKENS for percent in _SHARES
    )
    figures["ssd_blocks_fraction"] = ([counts["promoted_blocks"] / expected], "fraction")
    return figures


def link_figures(samples: _LinkSamples) -> _Figures:
    """Return samples and unit of each figure of the links, from the samples by link and way."""
    figures: _Figures = {}
    for link in dict.fromkeys(link for link, _ in samples):
        ttft_s = {way: [seconds for seconds, _ in samples[link, way]] for way in _LINK_WAYS}
        best = [min(pair) for pair in zip(ttft_s["fetch"], ttft_s["compute"], strict=True)]
        blocks = [float(num_blocks) for _, num_blocks in samples[link, "cut"]]
        at = f"at_{link:g}x"
        figures |= {f"ttft_{way}_{at}": (seconds, "s") for way, seconds in ttft_s.items()}
        figures[f"cut_blocks_fetched_{at}"] = (blocks, "blocks")
        for name, theirs in (
            ("best", best),
            ("fetch", ttft_s["fetch"]),
            ("compute", ttft_s["compute"]),
        ):
            figures[f"cut_vs_{name}_{at}"] = (paired_ratios(ttft_s["cut"], theirs), "ratio")
    return figures
