"""Options of ``banaserve bench compare``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from banaserve.base import models
from banaserve.base.arguments import Formatter, Parser
from banaserve.base.config.serve_config import MINIATURE
from banaserve.base.errors import UserError
from banaserve.orchestrator.control.costs import profile as profiles
from banaserve_bench.compare.result import Workload
from banaserve_bench.datasets.items import Dataset, Words
from banaserve_bench.serving.command import (
    add_lengths,
    finite,
    numbers,
    wanted_lengths,
    whole_numbers,
)
from banaserve_bench.serving.run import ServingPlan
from banaserve_bench.serving.summary import Slo

_MAX_PROMPT_TOKENS = 4000


def make_parser(about: str | None = None) -> Parser:
    parser = Parser(
        prog="banaserve bench compare",
        usage="banaserve bench compare [options]",
        description=about,
        formatter_class=Formatter,
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("bench-compare"), help="folder of results and report")
    add("--model", help=f"model of all systems ({models.PACKAGED})")
    add("--pace", metavar="PROFILE", help="profile of paced engines: all seconds are modelled")
    add("--dilate", type=float, default=1.0, metavar="N", help="wall seconds of a modelled one")
    add("--instances", type=int, default=2, help="number of engines of each system")
    add("--system", action="append", default=[], help="one of those above; repeat (all)")
    add(
        "--workload",
        action="append",
        default=[],
        metavar="DATASET[@RPS,...]",
        help="dataset, with its rates if not --rps; repeat (shared-prefix, multi-turn, random)",
    )
    add_lengths(parser)
    parser.set_defaults(prompt_tokens=100, prefixes=3, sessions=2)
    add("--rps", type=numbers, default=(0.5,), help="requests per second, such as 1,2,4 (0.5)")
    add("--seeds", type=whole_numbers, default=(0, 1, 2), help="seeds of the requests (0,1,2)")
    add("--requests", type=int, help="requests of each rate and seed (16)")
    add("--duration", type=finite, metavar="SECONDS", help="instead: time in which they arrive")
    add("--warmup", type=finite, default=0.0, metavar="SECONDS", help="time that does not count")
    add("--check", type=int, default=4, help="answers of each workload compared with one engine")
    add(
        "--serve-option", action="append", default=[], help="option of serve, such as --x=y; repeat"
    )
    return parser


def parse(argv: Sequence[str], about: str | None) -> argparse.Namespace:
    """Return the options; ``profile`` is None where time is real.

    Raises:
        UserError: An option is invalid, or the profile does not exist.
    """
    given = make_parser(about).parse_args(list(argv))
    given.workload = given.workload or ["shared-prefix", "multi-turn", "random"]
    given.profile = None
    if given.pace is not None:
        if given.model is not None:
            raise UserError("--pace runs a miniature of its profile's model: leave out --model")
        given.profile = profiles.load(given.pace)
    elif given.dilate != 1:
        raise UserError("--dilate stretches modelled time: give --pace PROFILE with it")
    elif given.output_tokens is None:
        given.output_tokens = 16
    given.model = MINIATURE if given.profile else given.model or models.PACKAGED
    if given.instances < 2:
        raise UserError(f"--instances {given.instances}: give 2 or more, for prefill and decode")
    if given.check < 0:
        raise UserError(f"--check {given.check}: give 0 or more")
    if given.requests is not None and given.duration is not None:
        raise UserError("give --requests or --duration, not both")
    if given.duration == 0:
        raise UserError("--duration 0: give more than 0 s")
    if given.requests is None and given.duration is None:
        given.requests = 16
    if given.requests is not None:
        given.check = min(given.check, given.requests)
    if not 0 < given.dilate < float("inf"):
        raise UserError(f"--dilate {given.dilate:g}: give more than 0")
    return given


def plans(given: argparse.Namespace) -> dict[str, ServingPlan]:
    """Return the serving plan of each workload by name.

    Raises:
        UserError: A workload is given twice, its rates are not numbers, or there is nothing to
            send.
    """
    found: dict[str, ServingPlan] = {}
    for word in given.workload:
        name, _, rates = word.partition("@")
        if name in found:
            raise UserError(f"--workload {name}: once, with all its rates")
        try:
            found[name] = _plan(given, numbers(rates) if rates else given.rps)
        except argparse.ArgumentTypeError:
            raise UserError(f"--workload {word}: give rates as in {name}@1,2,4") from None
    return found


def _plan(given: argparse.Namespace, rates: tuple[float, ...]) -> ServingPlan:
    plan = ServingPlan(
        arrival="poisson",
        loads=rates,
        seeds=given.seeds,
        requests=given.requests,
        duration_s=given.duration or 0.0,
        warm_up_s=given.warmup,
        variation=1.0,
        slo=Slo(given.slo_ttft, given.slo_tpot),
        exact_output=True,
    )
    plan.check()
    return plan


def workloads(
    given: argparse.Namespace, asked: dict[str, ServingPlan], words: Words
) -> list[Workload]:
    """Return the workloads with their datasets; a data file gives its name without the folder.

    Raises:
        UserError: An unknown dataset, data with wrong fields, or two files of one name.
    """
    found = [
        Workload(Path(name).name, _dataset(given, name, words), plan)
        for name, plan in asked.items()
    ]
    if len({one.name for one in found}) < len(found):
        raise UserError("--workload: two files of the same name: give one of them another")
    return found


def _dataset(given: argparse.Namespace, name: str, words: Words) -> Dataset:
    context = given.profile.model.max_context_tokens if given.profile else None
    most = None if context else _MAX_PROMPT_TOKENS
    wanted = wanted_lengths(
        given, name, range_fraction=0.5, max_prompt_tokens=most, context_tokens=context
    )
    return Dataset(wanted, words)
