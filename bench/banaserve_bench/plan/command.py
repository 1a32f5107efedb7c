"""Command line of ``banaserve plan``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from banaserve.base.arguments import ABOVE_0, AT_LEAST_1, Rule, option
from banaserve.base.errors import UserError
from banaserve.cli.app import App
from banaserve.cli.terminal.console import print_json
from banaserve.orchestrator.control.costs import profile as profiles
from banaserve_bench.plan.confirm.confirmation import check_confirmable, confirmed
from banaserve_bench.plan.confirm.history import past_words
from banaserve_bench.plan.confirm.options import ConfirmOptions
from banaserve_bench.plan.confirm.report import (
    confirmation_json,
    errors_of,
    keep_errors,
    show_confirmation,
)
from banaserve_bench.plan.page.html_page import check_path, write_page
from banaserve_bench.plan.probe.command import probe_command
from banaserve_bench.plan.report import PlanReport, first_words
from banaserve_bench.plan.search.advisor import Screening, advise, screen
from banaserve_bench.plan.search.candidates import MOST_STEP_TOKENS, USUAL_STEP_TOKENS
from banaserve_bench.plan.search.engines import DEFAULT_GPUS, AskedEngine, find_devices
from banaserve_bench.plan.search.loads import read_loads
from banaserve_bench.plan.search.question import PlanQuestion
from banaserve_bench.plan.search.trial import Device, StepError
from banaserve_bench.silicon import description as step_times
from banaserve_bench.simulation.job import AskedSystem, SimulationJob, job

_INSTANCES = 4
_LEAST_SEEDS = 2


@dataclass(frozen=True, kw_only=True)
class PlanOptions(ConfirmOptions, AskedSystem):
    """Options of ``banaserve plan``: load and limits as of ``simulate``; the systems are found.

    Attributes:
        systems, policy, prefill, decode: No options here, since the search varies them.
    """

    systems: Sequence[str] = ()
    policy: str | None = None
    prefill: int | None = None
    decode: int | None = None
    instances: int | None = option(
        f"number of instances ({_INSTANCES}; of a case: as many as its first system has; with "
        "--model give --gpus)",
        None,
        int,
        rule=AT_LEAST_1,
    )
    model: str | None = option(
        "a config.json, a folder with one, or a name: in place of --profile and --step-times, "
        "which are derived from it and --device",
        None,
    )
    device: str | None = option("kind of GPU, such as h100_sxm", None)
    tensor_parallel: int | None = option(
        "GPUs of each instance (1, 2, 4 and 8 are tried)", None, int, rule=AT_LEAST_1
    )
    gpus: int | None = option(
        f"GPUs in all, with --model ({DEFAULT_GPUS})", None, int, rule=AT_LEAST_1
    )
    link_gb_per_s: float | None = option(
        "bandwidth between instances, for each GPU (that of its usual network)",
        None,
        float,
        name="--link",
        rule=ABOVE_0,
    )
    step_times: Path | None = option(
        "description of measured step times, in place of those of the profile",
        None,
        Path,
        metavar="FILE",
    )
    step_error: float | None = option(
        "relative error of the step times, where it is known otherwise (that of --step-times)",
        None,
        float,
        rule=Rule(lambda value: 0 <= value <= 1, "must be between 0 and 1"),
    )
    max_step_tokens: int | None = option(
        f"largest step size that is tried ({MOST_STEP_TOKENS}; {USUAL_STEP_TOKENS} with "
        "--step-times, whose range may end there)",
        None,
        int,
        rule=Rule(lambda value: value >= USUAL_STEP_TOKENS, f"give {USUAL_STEP_TOKENS} or more"),
    )
    elastic: bool = option("also try roles that follow the load: takes minutes", False)
    price: float | None = option(
        "price of an instance for an hour; with --model, of a GPU", None, float, rule=ABOVE_0
    )
    seeds: int = option(
        "number of loads that judge, each drawn from the next seed or a part of the trace",
        5,
        rule=Rule(lambda value: value >= _LEAST_SEEDS, f"must be at least {_LEAST_SEEDS}"),
    )
    seed: int | None = option("seed of the first load (0; of a case: its own)", None, int)
    as_json: bool = option("print the advice as JSON", False, name="--json")
    html: Path | None = option("file for the advice as a page", None, Path, metavar="FILE")


def plan_command(options: PlanOptions) -> int:
    """Say whether to split prefill and decode for a load, by simulating both.

    The answer is yes, no or can't tell. It is yes only where the interval of the gain over the best
    colocated instances is above 1, by the spread over loads and the error of the step times.
    """
    if options.html is not None:
        check_path(options.html)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    console = Console(stderr=True)
    is_silent = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=is_silent) as progress:
        task = progress.add_task("reading the load, and operators", total=None)

        def tell(words: str) -> None:
            progress.update(task, description=words)

        def show(found: Screening) -> None:
            console.print(first_words(found), highlight=False, soft_wrap=True)

        planned, asked = _question(options)
        if options.is_confirmed:
            check_confirmable(asked, options)
        found = screen(asked, tell, show)
        advice = advise(asked, found, tell)
        # What is stated is from before this confirmation, as the advice is.
        past = errors_of(asked.device, console)
        done = confirmed(asked, found, advice, options, tell) if options.is_confirmed else []
        keep_errors(asked, done)
        report = PlanReport(
            planned, asked, found, advice, options.price, _served(options.model), past_words(past)
        )
        if options.html is not None:
            write_page(report, options.html, tell)
    if options.as_json:
        print_json({**report.as_json(), "past_errors": past, "confirmed": confirmation_json(done)})
    else:
        report.show()
        show_confirmation(done)
    return 0


def _served(model: str | None) -> str:
    """Return the model as ``serve`` gets it: a folder, or a name."""
    return "MODEL" if model is None else model.removesuffix("config.json").rstrip("/") or "."


def _question(options: PlanOptions) -> tuple[SimulationJob, PlanQuestion]:
    """Read and check everything that is asked; nothing has run then.

    Raises:
        UserError: The load, the device or an option is invalid.
    """
    devices = _devices(options)
    of_job = replace(options, instances=None)
    planned = job(of_job, devices[0].profile if devices else None)
    case = planned.case
    profile_name = options.profile or (case.profile_name if case else None)
    if profile_name is None and not devices:
        known = ", ".join(profiles.names())
        raise UserError(
            f"give --model and --device, or --profile, the device and model to plan for: {known} "
            "or a file"
        )
    if planned.events:
        raise UserError(f"{planned.name} has events: a plan is for instances that all serve")
    instances = options.instances
    if devices:
        instances = (options.gpus or DEFAULT_GPUS) // devices[0].gpus
    if instances is None:
        instances = len(next(iter(planned.systems.values())).roles()) if case else _INSTANCES
    if not devices:
        measured = None if options.step_times is None else step_times.read(options.step_times)
        devices = [Device(planned.profile, measured)]
    measured = devices[0].measured
    stated = devices[0].profile.error if measured is None else measured.error
    error = None if stated is None else StepError.of(stated)
    if options.step_error is not None:
        error = StepError(options.step_error, options.step_error)
    usual_most = USUAL_STEP_TOKENS if options.step_times is not None else MOST_STEP_TOKENS
    first = planned.seed if options.seed is None else options.seed
    return planned, PlanQuestion(
        device=devices[0],
        profile_name="" if options.model else profile_name or devices[0].profile.name,
        error=error,
        limits=planned.limits,
        loads=read_loads(planned, range(first, first + options.seeds)),
        instances=instances,
        has_elastic=options.elastic,
        max_step_tokens=options.max_step_tokens or usual_most,
        more_devices=devices[1:],
    )


def _devices(options: PlanOptions) -> list[Device]:
    """Return the instances that --model and --device give; none without these options.

    Raises:
        UserError: One of the two is missing, or an option has no meaning with or without them.
    """
    if options.model is None:
        for name in ("device", "tensor_parallel", "gpus", "link_gb_per_s"):
            if getattr(options, name) is not None:
                word = {"link_gb_per_s": "link"}.get(name, name).replace("_", "-")
                raise UserError(f"--{word} needs --model: a profile has its own")
        return []
    if options.device is None:
        raise UserError("--model needs --device, such as h100_sxm")
    for name in ("profile", "step_times", "instances"):
        if getattr(options, name):
            instead = "give --gpus" if name == "instances" else "leave it out, or --model"
            raise UserError(f"--{name.replace('_', '-')} does not go with --model: {instead}")
    link = None if options.link_gb_per_s is None else 1e9 * options.link_gb_per_s
    gpus = options.gpus or DEFAULT_GPUS
    asked = AskedEngine(options.model, options.device, options.tensor_parallel, gpus, link)
    return find_devices(asked)


app = App(plan_command, "", probe=probe_command)
