"""``banaserve bench migration``: what moving layers and heads between instances takes and brings.

One stream decodes on d0 while parts of it move to p0 and back, again and again, with a short and a
long context; then a batch runs on a pool too small for it, before and after layers have moved away.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.progress import Progress

from banaserve import models
from banaserve.api.admin_client import AdminClient
from banaserve.arguments import Parser, positive
from banaserve.bench import result, workloads
from banaserve.bench.client import OpenAiClient
from banaserve.bench.migration_memory import Batch, run_batch
from banaserve.bench.migration_rounds import (
    Case,
    Rounds,
    figures_of,
    heads,
    layers,
    run_round,
    stream,
)
from banaserve.bench.servers import Server, banaserve_server, end_on_sigterm
from banaserve.engine.vllm.migration.api import MoveLayers, Return
from banaserve.errors import UserError
from banaserve.run_dir import find_admin

_CASES = (
    layers(1),
    layers(5),
    layers(10),
    layers(20),
    heads(1),
    heads(2),
    layers(10, precopy=False),
)
_CASES_AGAIN = ("layers_10", "layers_20", "heads_2", "stop_and_copy_10")
"""What is measured with every context after the first: where its length can show."""
_FLOAT32 = ("--pd", "1:1", "--dtype", "float32")
_POOL_BYTES = 768 << 20
_TABLE_WIDTH = 110
_SMALL_POOL_BLOCKS = 24
_BLOCK_BYTES = 30 * 128 * 2 * 3 * 64 * 4
_Samples = dict[str, tuple[list[float], str]]


def main(argv: Sequence[str]) -> int:
    """Run it and write the result; the exit code."""
    given = _parse(argv)
    end_on_sigterm()
    record = asyncio.run(_measure(given, datetime.now(UTC)))
    console = Console()
    Console(width=max(console.width, _TABLE_WIDTH)).print(result.table(record))
    if given.json is not None:
        result.write(record, given.json)
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="banaserve bench migration", description=__doc__)
    add = parser.add_argument
    add("--json", type=Path, help="write the result there")
    add("--runs", type=positive, default=5, help="of each case")
    add(
        "--contexts",
        type=int,
        nargs="*",
        default=[1000, 6000],
        metavar="TOKENS",
        help="of the stream while things move; none: only the batch",
    )
    add(
        "--cases",
        nargs="+",
        metavar="NAME",
        help=f"default: all with the first context, {', '.join(_CASES_AGAIN)} with the others",
    )
    add("--batch-requests", type=int, default=8, help="of the batch on a small pool; 0: none")
    add("--batch-prompt-tokens", type=int, default=389, help="which the store holds but for a few")
    add("--batch-output-tokens", type=int, default=192, help="enough to need one block more")
    add("--batch-runs", type=int, default=3, help="of the batch, before and after each")
    add("--seed", type=int, default=0)
    given = parser.parse_args(list(argv))
    known = {case.name for case in _CASES}
    if unknown := [name for name in given.cases or () if name not in known]:
        raise UserError(f"--cases {unknown[0]}: one of {', '.join(sorted(known))}")
    return given


async def _measure(given: argparse.Namespace, started_at: datetime) -> result.Result:
    plan = [(context, _cases(given, number)) for number, context in enumerate(given.contexts)]
    samples: _Samples = {}
    with Progress(transient=True) as progress:
        total = sum(len(cases) for _, cases in plan) * given.runs
        total += (2 * given.batch_runs + 1) * bool(given.batch_requests)
        task = progress.add_task("starting", total=total)

        def advance(what: str) -> None:
            progress.update(task, description=what, advance=1)

        for context, cases in plan:
            samples |= await _context(given, context, cases, advance)
        if given.batch_requests:
            samples |= await _batches(given, advance)
    return _result(given, started_at, samples)


def _cases(given: argparse.Namespace, number: int) -> list[Case]:
    """What is measured with the context of this number."""
    names = given.cases or (_CASES_AGAIN if number else [case.name for case in _CASES])
    return [case for case in _CASES if case.name in names]


async def _context(
    given: argparse.Namespace, context: int, cases: Sequence[Case], advance: Callable[[str], None]
) -> _Samples:
    prompt = _prompts(1, context, given.seed)[0]
    options = (*_FLOAT32, "--kv-cache-memory-bytes", str(_POOL_BYTES))
    samples: _Samples = {}
    with _server(*options) as (server, admin):
        async with OpenAiClient(server.url, models.PACKAGED, return_token_ids=True) as client:
            for case in cases:
                for name, sample in (
                    await _rounds(given, client, admin, prompt, case, advance)
                ).items():
                    samples[f"{case.name}.{context}.{name}"] = sample
    return samples


async def _rounds(
    given: argparse.Namespace,
    client: OpenAiClient,
    admin: AdminClient,
    prompt: Sequence[int],
    case: Case,
    advance: Callable[[str], None],
) -> _Samples:
    async with stream(client, prompt, 8000 - len(prompt)) as record:
        done = Rounds(case, record)
        for _ in range(given.runs):
            done.rounds.append(await run_round(client, admin, case))
            advance(f"{case.name} with {len(prompt)} tokens")
    return figures_of(done)


async def _batches(given: argparse.Namespace, advance: Callable[[str], None]) -> _Samples:
    prompts = _prompts(given.batch_requests, given.batch_prompt_tokens, given.seed + 1)
    pool = ("--kv-cache-memory-bytes", str(_SMALL_POOL_BLOCKS * _BLOCK_BYTES + (1 << 20)))
    length = given.batch_prompt_tokens + given.batch_output_tokens
    options = (*_FLOAT32, *pool, "--max-model-len", str(length + 64))
    passes: dict[str, list[Batch]] = {"before": [], "after": []}
    with _server(*options) as (server, admin):
        async with OpenAiClient(server.url, models.PACKAGED, return_token_ids=True) as client:

            async def run() -> Batch:
                tokens = given.batch_output_tokens
                return await run_batch(server, admin, client, prompts, tokens)

            await run()  # so that the store holds every prompt
            advance("a batch on a small pool")
            for _ in range(given.batch_runs):
                if passes["after"]:
                    await asyncio.to_thread(admin.run, Return("d0"))
                passes["before"].append(await run())
                advance("a batch on a small pool")
                moved = await asyncio.to_thread(admin.run, MoveLayers("d0", "p0", (10, 20)))
                if moved.state != "done":
                    raise UserError(f"layers {moved.state}: {moved.error}")
                passes["after"].append(await run())
                advance("the same with ten layers away")
    return _batch_samples(passes["before"], passes["after"])


def _batch_samples(before: Sequence[Batch], after: Sequence[Batch]) -> _Samples:
    samples: _Samples = {}
    for when, batches in (("before", before), ("after", after)):
        samples[f"batch.tokens_{when}"] = [b.tokens_per_s for b in batches], "tokens/s"
        samples[f"batch.running_{when}"] = [b.running for b in batches], "requests"
        samples[f"batch.preemptions_{when}"] = [b.preemptions for b in batches], "requests"
        samples[f"batch.pool_{when}"] = [float(b.num_blocks) for b in batches], "blocks"
    pairs = list(zip(before, after, strict=True))
    samples["batch.tokens_ratio"] = [a.tokens_per_s / b.tokens_per_s for b, a in pairs], "ratio"
    samples["batch.running_ratio"] = [a.running / b.running for b, a in pairs], "ratio"
    equal = [float(b.token_ids == a.token_ids) for b, a in pairs]
    samples["batch.equal_answers_fraction"] = equal, "fraction"
    return samples


@contextlib.contextmanager
def _server(*options: str) -> Iterator[tuple[Server, AdminClient]]:
    with TemporaryDirectory(prefix="bench-") as folder:
        run_dir = Path(folder) / "run"
        with banaserve_server(models.PACKAGED, *options, "--run-dir", str(run_dir)) as server:
            yield server, AdminClient(*find_admin(run_dir))


def _prompts(count: int, num_tokens: int, seed: int) -> list[list[int]]:
    """Token ids of texts, each with exactly ``num_tokens``."""
    from transformers import AutoTokenizer

    model = models.resolve(models.PACKAGED, None, lambda line: print(line, flush=True))
    tokenizer = AutoTokenizer.from_pretrained(model.path_or_id)

    def tokenize(text: str) -> list[int]:
        return list(tokenizer(text, verbose=False)["input_ids"])

    longest = int(num_tokens * 1.1) + 20
    found = workloads.prompts("synthetic", count, num_tokens, longest, seed, tokenize)
    return [tokenize(prompt.text)[:num_tokens] for prompt in found]


def _result(given: argparse.Namespace, started_at: datetime, samples: _Samples) -> result.Result:
    return result.result(
        "migration",
        seed=given.seed,
        options={name: str(value) for name, value in vars(given).items() if name != "json"},
        started_at=started_at,
        figures={name: result.figure(*sample) for name, sample in samples.items()},
        notes=[
            "CASE.CONTEXT.FIGURE: one stream with CONTEXT tokens decodes on d0 while CASE moves "
            "to p0 and back; one sample a round trip",
            "gap_ratio: longest gap between two tokens from the request to move until its end, "
            "against the median gap in the second before; gap_ratio_calm: the longest gap of those",
            "host_step_ratio: median gap while the case is away against the one before",
            "bandwidth_fraction: copies while the engine serves against the same transport and "
            "page size alone, measured right after while the stream goes on",
            "stop_and_copy: the same move without copying ahead",
            "batch: requests at once on a pool of 24 blocks, before and after 10 of 30 layers of "
            "d0 run beside p0; all prompts are in the store",
        ],
    )
