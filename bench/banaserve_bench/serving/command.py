"""Measure what a server gives its users at a given load.

Sends requests to any server with OpenAI's completions API and records the outcome of each.
Arrivals do not wait for answers (except with --arrival closed); failures and timeouts are
counted, never dropped. Each rate runs with each seed; a stopped run is resumed when it is started
again with the same options.

Datasets: alpaca, azure, longbench, mooncake, sharegpt (yours: --data or BANASERVE_DATA), a file
(formats: benchmarks/README.md), or made up: random, shared-prefix, multi-turn, and stand-ins with
published length distributions, alpaca-like, azure-like, longbench-like, mooncake-like,
sharegpt-like.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from banaserve.base.arguments import Formatter, Parser, positive
from banaserve.base.errors import UserError
from banaserve.base.text.names import check_known
from banaserve.cli.terminal.console import print_rows
from banaserve_bench.datasets.items import Dataset, WantedLengths, Words
from banaserve_bench.loadgen.arrivals import KINDS
from banaserve_bench.loadgen.client import CompletionCall, OpenAiClient
from banaserve_bench.loadgen.loops import run_fast
from banaserve_bench.loadgen.modelled_time import modelled_time
from banaserve_bench.loadgen.target import ServerUnderTest, find_target, find_tokenizer, try_out
from banaserve_bench.results import result
from banaserve_bench.results.figure_text import NO_VALUE, interval_text
from banaserve_bench.results.result import ModelledTime
from banaserve_bench.serving.cell import CellId, Ended
from banaserve_bench.serving.run import (
    RunFolder,
    ServingPlan,
    as_result,
    run_cells,
    stopped_by_signals,
)
from banaserve_bench.serving.summary import LATENCIES, Slo, Summary

_ROWS = (
    ("requests/s", "requests_per_s", 1.0),
    ("goodput, requests/s", "goodput_per_s", 1.0),
    ("output tokens/s", "output_tokens_per_s", 1.0),
    ("input + 2 output tokens/s", "weighted_tokens_per_s", 1.0),
    *(
        (f"{name.upper() if name != 'e2e' else name} {at}, ms", f"{name}_{at}", 1e3)
        for name in LATENCIES
        for at in ("mean", "p50", "p90", "p99")
    ),
    ("prompt tokens", "prompt_tokens_mean", 1.0),
    ("output tokens", "output_tokens_mean", 1.0),
    ("of the prompt cached", "cached_fraction", 1.0),
    ("sent late p99, ms", "send_delay_p99", 1e3),
    ("client, of a core", "client_cpu_fraction", 1.0),
)


def summary_rows(summaries: Sequence[Summary]) -> list[list[str]]:
    """Return a heading with all loads, and a row for each figure that some load has.

    Cells are means over seeds, ± half their 95% interval.
    """
    by_load: dict[str, list[Summary]] = {}
    for summary in summaries:
        by_load.setdefault(summary.load_name, []).append(summary)
    rows = [["mean over seeds, ± half the 95% interval", *by_load]]
    counts = ["requests", "failed", "timed_out"]
    if any(one.cut_prompts for one in summaries):
        counts.append("cut_prompts")
    for count in counts:
        totals = (sum(getattr(one, count) for one in same) for same in by_load.values())
        rows.append([count.replace("_", " "), *map(str, totals)])
    for name, metric, factor in _ROWS:
        cells = [
            interval_text([one.metrics[metric] for one in same if metric in one.metrics], factor)
            for same in by_load.values()
        ]
        if any(cell != NO_VALUE for cell in cells):
            rows.append([name, *cells])
    return rows


_NOTES = (
    "a sample a seed; every request after the warm-up counts, failures included",
    "TTFT and e2e from sending, e2e to the end of the stream; TPOT over the tokens after the first",
    "weighted: (input + 2 x output) tokens; goodput: requests within the SLOs",
)


def main(argv: Sequence[str]) -> int:
    """Run the plan, keep the records, print the table; return the exit code."""
    given = parse(argv)
    plan = _plan(given)
    target = find_target(given.url, given.model, given.api_key)
    words = Words.of(find_tokenizer(target, given.tokenizer))
    dataset = Dataset(_wanted(given, target), words)
    if given.arrival == "trace" and not dataset.has_times:
        raise UserError(f"{given.dataset} has no arrival times: give another --arrival")
    folder = RunFolder(given.out, {**_options(given), "url": target.url, "model": target.model})
    summaries = _run(given, plan, target, dataset, folder)
    print_rows(summary_rows(summaries), {})
    print(f"records and result: {given.out}")
    return 0


def make_parser() -> Parser:
    parser = Parser(
        prog="banaserve bench serving",
        usage="banaserve bench serving [options]",
        description=__doc__,
        formatter_class=Formatter,
    )
    _add_target(parser)
    _add_requests(parser)
    _add_load(parser)
    add = parser.add_argument
    add("--out", type=Path, default=Path("bench-serving"), help="folder of records and result")
    add("--json", type=Path, help="file for another copy of the result")
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the options; those that are not given get values that suit the others."""
    given = make_parser().parse_args(list(argv))
    if given.api_key is None:
        given.api_key = os.environ.get("BANASERVE_API_KEY")
    if given.arrival is None:
        given.arrival = "closed" if given.rps is None else "poisson"
    if given.warmup is None:
        given.warmup = 10.0 if given.requests is None else 0.0
    return given


def _add_target(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="address of any OpenAI-compatible server")
    add("--api-key", metavar="KEY", help="API key, if the server needs one ($BANASERVE_API_KEY)")
    add("--model", help="name of the model (the server's first one)")
    add("--tokenizer", help="folder or id of the tokenizer (where the server says its model is)")
    add("--timeout", type=finite, default=600.0, metavar="SECONDS", help="time for a whole request")


def _add_requests(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--dataset", default="alpaca-like", help="name of a dataset, or a file")
    add_lengths(parser)
    add("--range-fraction", type=finite, default=0.0, help="spread of random's lengths, 0 to 1 (0)")
    add("--trace-block-tokens", type=positive, default=512, help="tokens per hash id of a trace")
    add("--max-prompt-tokens", type=positive, help="length at which longer prompts are cut (none)")
    add("--send", choices=("tokens", "text"), default="tokens", help="form of made-up prompts")
    add(
        "--no-exact-output",
        action="store_true",
        help="do not send ignore_eos and min_tokens: answers may be shorter than asked",
    )


def add_lengths(parser: argparse.ArgumentParser) -> None:
    """Add the options of data and lengths that ``bench compare`` has, too."""
    add = parser.add_argument
    add("--data", type=Path, help="file or folder of a named dataset; or hub, to download it")
    add("--prompt-tokens", type=positive, default=256, help="mean length of made-up prompts")
    add("--output-tokens", type=positive, help="length of answers (as the data say; compare: 16)")
    add("--max-output-tokens", type=positive, help="length at which longer answers are cut (none)")
    add("--prefix-tokens", type=int, default=1000, help="length of a prefix of shared-prefix")
    add("--prefixes", type=positive, default=1, help="number of prefixes of shared-prefix")
    add("--sessions", type=positive, default=8, help="chats of multi-turn that go on at once")
    add("--slo-ttft", type=finite, metavar="SECONDS", help="limit of TTFT, for goodput (none)")
    add("--slo-tpot", type=finite, metavar="SECONDS", help="limit of TPOT, for goodput (none)")


def _add_load(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--rps", type=numbers, help="requests per second; several such as 1,2,4 run in turn")
    add("--arrival", help=f"one of {', '.join(KINDS)} (poisson with --rps, else closed)")
    add("--variation", type=finite, default=2.0, help="coefficient of variation of gamma arrivals")
    add("--concurrency", type=numbers, default=(8,), help="requests under way, if closed (8)")
    add("--requests", type=int, help="requests of each cell (those of --warmup and --duration)")
    add("--duration", type=finite, default=60.0, metavar="SECONDS", help="time that is measured")
    add(
        "--warmup",
        type=finite,
        metavar="SECONDS",
        help="time before, whose requests are sent but not counted (10; 0 with --requests)",
    )
    add("--seeds", type=whole_numbers, default=(0,), help="seeds, such as 0,1,2,3,4 (0)")


def numbers(text: str) -> tuple[float, ...]:
    try:
        values = tuple(float(word) for word in text.split(","))
    except ValueError:
        values = ()
    if not values or not all(0 < value < float("inf") for value in values):
        raise argparse.ArgumentTypeError(f"{text}: give numbers above 0, such as 1,2,4")
    return values


def finite(text: str) -> float:
    """Return the number of 0 or more that ``text`` spells: the ``type`` of an option."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: give a number, 0 or more")
    return value


def whole_numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: give whole numbers, such as 0,1,2") from None


def _plan(given: argparse.Namespace) -> ServingPlan:
    """Return the plan; raise UserError if the options are inconsistent."""
    check_known("arrival", given.arrival, KINDS)
    is_closed = given.arrival == "closed"
    if given.rps is None and given.arrival in ("poisson", "gamma"):
        raise UserError(f"{given.arrival} arrivals need --rps")
    if given.range_fraction > 1:
        raise UserError(f"--range-fraction {given.range_fraction:g}: give a share from 0 to 1")
    if is_closed and given.rps is not None:
        raise UserError("a closed loop has no --rps: give --concurrency")
    plan = ServingPlan(
        arrival=given.arrival,
        loads=given.concurrency if is_closed else given.rps or (None,),
        seeds=given.seeds,
        requests=given.requests,
        duration_s=given.duration,
        warm_up_s=given.warmup,
        variation=given.variation,
        slo=Slo(given.slo_ttft, given.slo_tpot),
        exact_output=not given.no_exact_output,
    )
    plan.check()
    return plan


def _wanted(given: argparse.Namespace, target: ServerUnderTest) -> WantedLengths:
    return wanted_lengths(
        given,
        given.dataset,
        range_fraction=given.range_fraction,
        trace_block_tokens=given.trace_block_tokens,
        max_prompt_tokens=given.max_prompt_tokens,
        context_tokens=target.context_tokens,
        as_text=given.send == "text",
    )


def wanted_lengths(given: argparse.Namespace, dataset: str, **more: Any) -> WantedLengths:
    """Return what the options of ``add_lengths`` say, and ``more``.

    Raises:
        UserError: The length of a prefix is below 0.
    """
    if given.prefix_tokens < 0:
        raise UserError(f"--prefix-tokens {given.prefix_tokens}: give 0 or more")
    return WantedLengths(
        dataset=dataset,
        data=given.data,
        prompt_tokens=given.prompt_tokens,
        output_tokens=given.output_tokens,
        prefix_tokens=given.prefix_tokens,
        num_prefixes=given.prefixes,
        sessions=given.sessions,
        max_output_tokens=given.max_output_tokens,
        **more,
    )


def _options(given: argparse.Namespace) -> dict[str, Any]:
    """Return the given options, without keys and without the machine's folders."""
    left_out = {"api_key", "data", "json", "model", "out", "timeout", "tokenizer", "url"}
    options = {name: value for name, value in vars(given).items() if name not in left_out}
    return {**options, "dataset": Path(given.dataset).name}


def _run(
    given: argparse.Namespace,
    plan: ServingPlan,
    target: ServerUnderTest,
    dataset: Dataset,
    folder: RunFolder,
) -> list[Summary]:
    started_at = datetime.now(UTC)
    at_first = modelled_time(target.url)

    def keep() -> list[Summary]:
        complete = [one for cell in plan.cells() if (one := folder.summary(cell)) is not None]
        record = as_result(
            complete,
            options={**_options(given), "model": Path(target.model).name},
            started_at=started_at,
            num_cells=len(plan.cells()),
            notes=_NOTES,
        )
        if at_first is not None:
            record = msgspec.structs.replace(record, modelled_time=[_last(target, at_first)])
        for path in (given.out / "result.json", given.json):
            if path is not None:
                result.write(record, path)
        return complete

    try:
        run_fast(_measure(given, plan, target, dataset, folder))
    except asyncio.CancelledError:
        complete = keep()
        raise UserError(
            f"interrupted: {len(complete)} of {len(plan.cells())} cells are complete, the rest is "
            f"kept as *.part.jsonl in {folder.records}; the same command goes on there"
        ) from None
    except UserError:
        keep()
        raise
    return keep()


def _last(target: ServerUnderTest, known: ModelledTime) -> ModelledTime:
    """Return the server's modelled time, or ``known`` if the server is gone."""
    try:
        return modelled_time(target.url) or known
    except UserError:
        return known


async def _measure(
    given: argparse.Namespace,
    plan: ServingPlan,
    target: ServerUnderTest,
    dataset: Dataset,
    folder: RunFolder,
) -> None:
    client = OpenAiClient(
        target.url, target.model, api_key=given.api_key, timeout_s=given.timeout, read_late=True
    )
    with stopped_by_signals(), _bar() as bar:
        async with client:
            first = dataset.items(1, "first", 0)[0]
            extra = {"ignore_eos": True, "min_tokens": 1} if plan.exact_output else {}
            await try_out(
                client, CompletionCall("first", prompt=first.prompt, max_tokens=1, extra=extra)
            )
            await run_cells(plan, client, dataset, folder, partial(_shown, bar))


def _bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        refresh_per_second=2,
    )


def _shown(bar: Progress, cell: CellId, count: int) -> Ended:
    task = bar.add_task(cell.name, total=count)

    def ended(num_ended: int, num_failed: int) -> None:
        failed = f", {num_failed} failed" if num_failed else ""
        bar.update(task, completed=num_ended, description=f"{cell.name}{failed}")

    return ended
