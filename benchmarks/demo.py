"""Demonstration: four paced engines under a load that swings, shown on the page.

``make demo``. The time of the engines is modelled, so that the load of four GPUs fits two cores.
First the speed of this machine is measured. Then four instances whose roles follow the load serve
it, and after them two prefill and two decode instances with fixed roles. The last line gives the
number of requests in time in both, or the reason if the machine could not keep up.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import psutil

from banaserve.base.arguments import Parser
from banaserve.base.config.serve_config import MINIATURE
from banaserve.base.errors import UserError
from banaserve.contracts.migration_api import MoveLayers, Return
from banaserve.frontdoor.admin_client import AdminClient
from banaserve.frontdoor.page.records import page_link
from banaserve_bench.loadgen.client import OpenAiClient
from banaserve_bench.loadgen.modelled_time import MOST_LATE, modelled_time
from banaserve_bench.loadgen.servers import Server, banaserve_server, end_on_sigterm
from banaserve_bench.serving.simulated_requests import CaseRequest, figures_of, send
from banaserve_bench.simulation import case as cases
from banaserve_bench.simulation.case import Case
from banaserve_bench.simulation.workload import Lengths

_CASE = "oscillating-load"
_DILATIONS = (4.0, 8.0, 13.0)
_LEAST_DILATION = 2.0
_BUSY_FRACTION = 0.6
"""Share of the processors' time to use: busier machines run some steps late."""
_PROMPTS_FACTOR = 1.35
"""Factor on the case's rate of long prompts: in phases under a minute too few would pile up."""
_MOST_OUTPUT_TOKENS = 350
_PHASE_S = 9.0
"""Modelled time of each phase: half of it is too short for a change of roles to pay."""
_TRIAL_S, _TRIAL_TOKENS = 2.5, 130
_TIMEOUT_S = 600.0
_TIME_TO_OPEN_S = 5.0
_TELL_EVERY_S = 10.0
_SHARED = ("--kv-store-size", "512MiB", "--max-concurrent-requests", "8192")


class DemoRun(NamedTuple):
    """Outcome of the load on one arrangement.

    Attributes:
        num_in_time: Number of requests within the limits.
        late_fraction: Share of steps that took longer than modelled.
        took_s: Duration in wall seconds.
        busy_fraction: Share of the processors' time that all programs took during the load.
    """

    num_requests: int
    num_in_time: int
    num_failed: int
    late_fraction: float
    took_s: float
    busy_fraction: float


def main(argv: Sequence[str]) -> int:
    parser = Parser(prog="python -m benchmarks demo", description=__doc__)
    parser.add_argument("--port", type=int, help="of both servers (a free one)")
    parser.add_argument("--dilate", type=float, help="wall seconds of a modelled one (measured)")
    parser.add_argument(
        "--phase-s",
        type=float,
        default=_PHASE_S,
        help=f"modelled seconds of each of two phases ({_PHASE_S:g})",
    )
    parser.add_argument("--log", type=Path, default=Path("build/demo.jsonl"), help="of decisions")
    given = parser.parse_args(list(argv))
    for name, least in (("dilate", 0.1), ("phase_s", 1.0)):
        value = getattr(given, name)
        if value is not None and value < least:
            raise UserError(f"--{name.replace('_', '-')} {value:g}: give {least:g} or more")
    end_on_sigterm()
    given.log.parent.mkdir(parents=True, exist_ok=True)
    for log in (given.log, _of_fixed(given.log)):
        log.unlink(missing_ok=True)
    asyncio.run(_show(given))
    return 0


async def _show(given: argparse.Namespace) -> None:
    case = shortened(cases.read(_CASE))
    dilation = given.dilate or await _measured(given, case)
    phases = tuple(replace(one, duration_s=given.phase_s) for one in case.phases)
    case = replace(case, phases=phases)
    limits = case.limits
    service = ("--slo-ttft", f"{limits.ttft_s:g}", "--slo-tpot", f"{limits.tpot_s:g}")
    follow = ("--instances", "4", *service)
    fixed = ("--pd", "2:2", "--orchestrator", "dry-run")
    logs = given.log, _of_fixed(given.log)
    minutes = math.ceil(2 * sum(one.duration_s for one in phases) * dilation / 60)
    print(f"{dilation:g} wall seconds a modelled one: both loads take {minutes} min or more")
    print("1 of 2: four instances whose roles follow the load", flush=True)
    first = await _run(given, case, dilation, follow, logs[0], is_shown=True)
    print("2 of 2: the same load on two prefill and two decode instances", flush=True)
    second = await _run(given, case, dilation, fixed, logs[1])
    for log in logs:
        print(f"play it again: banaserve ui --replay {log}")
    print(verdict(first, second, limits.ttft_s, limits.tpot_s))


def _of_fixed(log: Path) -> Path:
    return log.with_stem(f"{log.stem}-fixed")


def shortened(case: Case) -> Case:
    """Return a case whose load shows in seconds what the original shows in minutes."""
    prompts, answers = case.phases
    output = replace(answers.output, high=_MOST_OUTPUT_TOKENS)
    prompts = replace(prompts, rate_per_s=_PROMPTS_FACTOR * prompts.rate_per_s)
    return replace(case, phases=(prompts, replace(answers, output=output)), repeat=1)


def verdict(follows: DemoRun, fixed: DemoRun, ttft_s: float, tpot_s: float) -> str:
    """Return the last line: the requests in time, or why there is no verdict."""
    late = max(follows.late_fraction, fixed.late_fraction)
    if late > MOST_LATE:
        return (
            f"no verdict: {late:.1%} of the steps took longer than modelled (at most "
            f"{MOST_LATE:.0%}); end other programs, or give a larger --dilate"
        )
    has_paid = follows.num_in_time > fixed.num_in_time
    remedy = "changes of roles did not pay in phases as short as these (--phase-s)"
    return (
        f"in time (first token within {ttft_s:g} s, the others {tpot_s:g} s apart): "
        f"{follows.num_in_time} of {follows.num_requests} requests with roles that follow the "
        f"load, {fixed.num_in_time} of {fixed.num_requests} with fixed roles; "
        f"{late:.1%} of the steps late{'' if has_paid else f'; {remedy}'}"
    )


async def _measured(given: argparse.Namespace, case: Case) -> float:
    """Return a dilation at which this machine keeps up with the load, lower if it has idle time.

    Raises:
        UserError: The machine keeps up at none of the dilations.
    """
    peak = max(case.phases, key=lambda one: one.rate_per_s * one.output.mean)
    # The same tokens a second in more and shorter answers, so that the trial is over sooner.
    output = Lengths(kind="fixed", mean=_TRIAL_TOKENS)
    rate_per_s = peak.rate_per_s * peak.output.mean / _TRIAL_TOKENS
    peak = replace(peak, duration_s=_TRIAL_S, rate_per_s=rate_per_s, output=output)
    trial = replace(case, phases=(peak,))
    late = 1.0
    for dilation in _DILATIONS:
        print(f"measuring this machine: {dilation:g} wall seconds a modelled one", flush=True)
        options = ("--colocated", "4", "--orchestrator", "off", "--migration", "off")
        tried = await _run(given, trial, dilation, options, None)
        late, busy = tried.late_fraction, tried.busy_fraction
        print(
            f"  {late:.1%} of the steps took longer than modelled, processors {busy:.0%} busy",
            flush=True,
        )
        if late <= MOST_LATE / 2:
            needed = math.ceil(2 * dilation * busy / _BUSY_FRACTION) / 2
            return min(dilation, max(_LEAST_DILATION, needed))
    raise UserError(
        f"this machine is too slow: {late:.1%} of the steps are late even at {_DILATIONS[-1]:g} "
        "wall seconds a modelled one; end other programs, or give --dilate"
    )


async def _run(
    given: argparse.Namespace,
    case: Case,
    dilation: float,
    options: Sequence[str],
    log: Path | None,
    *,
    is_shown: bool = False,
) -> DemoRun:
    asked = [CaseRequest.of(one, case.seed) for one in case.requests(case.seed)]
    key = secrets.token_urlsafe(12)
    words = ["--pace", case.profile.name, "--dilate", f"{dilation:g}", *_SHARED, *options]
    words += [f"--admin-key={key}"]  # a key may begin with a dash
    if log is not None:
        words += ["--decision-log", str(log)]
    with banaserve_server(MINIATURE, *words, port=given.port) as server:
        if is_shown:
            code = AdminClient(server.url, key).page_code().code
            print(f"\n  page  {page_link(server.url, code)} (opens once)\n", flush=True)
            await asyncio.sleep(_TIME_TO_OPEN_S)
        name = f"paced-{case.profile.name}"
        async with OpenAiClient(server.url, name, timeout_s=_TIMEOUT_S, read_late=True) as client:
            began_s = time.monotonic()
            psutil.cpu_percent()
            with _told(server, len(asked)) if log is not None else nullcontext():
                sending = asyncio.create_task(send(client, asked, dilation))
                if is_shown:
                    await asyncio.to_thread(_move, server, key)
                records = await sending
            busy_fraction = psutil.cpu_percent() / 100
        told = modelled_time(server.url)
    assert told is not None, "a paced server says how it kept time"
    figures = figures_of(records, dilation, case.limits)
    return DemoRun(
        len(records),
        round(figures["goodput_fraction"] * len(records)),
        sum(one.error is not None for one in records),
        told.overrun_fraction,
        time.monotonic() - began_s,
        busy_fraction,
    )


@contextmanager
def _told(server: Server, num_requests: int) -> Iterator[None]:
    """Print every few seconds how many requests run and how many wait."""
    over = threading.Event()

    def tell() -> None:
        began_s = time.monotonic()
        while not over.wait(_TELL_EVERY_S):
            running, waiting = (
                server.metric(f"vllm:num_requests_{state}") for state in ("running", "waiting")
            )
            print(
                f"  {time.monotonic() - began_s:3.0f} s: of {num_requests} requests {running:.0f} "
                f"run and {waiting:.0f} wait",
                flush=True,
            )

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _move(server: Server, key: str) -> None:
    """Move a quarter of an instance's layers to another instance, and home again."""
    admin = AdminClient(server.url, key)
    (host,) = [one for one in admin.placement().instances if one.id == "c0"]
    print(f"  layers 0:{host.num_layers // 4} of c0 go to c1, and home again", flush=True)
    for ask in (MoveLayers("c0", "c1", (0, host.num_layers // 4)), Return("c0")):
        admin.run(ask)
        time.sleep(3)  # time for viewers to see the move
