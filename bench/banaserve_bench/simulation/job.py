"""Job of a simulation: systems under one load, which is a case, a trace or a distribution."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random

from banaserve.base.arguments import AT_LEAST_1, argument, derived, extra, option
from banaserve.base.errors import UserError
from banaserve.base.text.names import check_known
from banaserve.orchestrator.control.costs import profile as profiles
from banaserve.orchestrator.control.costs.profile import Profile
from banaserve.orchestrator.control.move_policies import registry as migrations
from banaserve.sim.request import SimRequest
from banaserve.sim.result import LatencyLimits
from banaserve.sim.system import KINDS, System, following, preset
from banaserve.sim.trace import Arrival, has_time, read_trace, requests_of, trace_records
from banaserve_bench.simulation import case as cases
from banaserve_bench.simulation.case import Case
from banaserve_bench.simulation.events import Event
from banaserve_bench.simulation.lengths import (
    CHARACTERS_A_TOKEN,
    DATASETS,
    draw_measured,
    read_lengths,
    token_counter,
)
from banaserve_bench.simulation.workload import Arrivals, Lengths, Pair, arriving, check_duration

ARRIVALS = ("bursts", "diurnal", "poisson", "trace")
DEFAULT_PROFILE = "opt-13b-a100"
DEFAULT_DURATION_S = 300.0
_INSTANCES = 4
_DRAWN = 1000
"""Number of lengths that are drawn to estimate the share of those that the context cuts."""

_EVERY_SYSTEM = ("colocated", "static", "elastic")
_FILES = (".json", ".jsonl", ".csv", ".zst")


def _parse_pd(text: str) -> tuple[int, int]:
    prefill, _, decode = text.partition(":")
    if not (prefill.isdecimal() and decode.isdecimal()):
        raise UserError(f"pd is {text}: give P:D, such as 2:2")
    return int(prefill), int(decode)


def parse_lengths(text: str) -> Lengths:
    """Return the lengths that ``N`` or ``LOW-HIGH`` stands for.

    Raises:
        UserError: The text is neither.
    """
    low, dash, high = text.partition("-")
    if not low.isdecimal() or (dash and not high.isdecimal()):
        raise UserError(f"tokens are {text}: give a number, or LOW-HIGH such as 500-4000")
    return (
        Lengths(kind="uniform", low=int(low), high=int(high))
        if dash
        else Lengths(kind="fixed", mean=int(low))
    )


def _instances(known: Namespace) -> int | None:
    given = [one for one in (known.pd, known.instances, known.colocated) if one is not None]
    if len(given) > 1:
        raise UserError("give one of --pd, --instances and --colocated")
    found: int | None = known.instances if known.colocated is None else known.colocated
    return found


@dataclass(frozen=True, kw_only=True)
class AskedSystem:
    """Options of a simulation; None stands for the target's own value, or the default.

    The help text of an option says what a field means.

    Attributes:
        systems: Names of the systems to run; empty for all.
        prefill, decode: Number of instances of each role.
    """

    target: str = argument(
        "a case, a .toml file with one, a trace (Mooncake, Azure), a log with token counts, what "
        "`banaserve trace --last 1000 --json` prints, a file of lengths or texts (ShareGPT), or "
        "alpaca or longbench: their lengths",
        "",
    )
    prompt_lengths: Lengths | None = option(
        "tokens of each prompt, or a range such as 500-4000, in place of a file",
        None,
        parse_lengths,
        name="--prompt-tokens",
        metavar="N",
    )
    output_lengths: Lengths | None = option(
        "tokens of each answer, or a range",
        None,
        parse_lengths,
        name="--output-tokens",
        metavar="N",
    )
    tokenizer: Path | None = option(
        "folder with the tokenizer.json that counts tokens of texts (else estimated: "
        f"{CHARACTERS_A_TOKEN:g} characters a token)",
        None,
        Path,
        metavar="DIR",
    )
    systems: Sequence[str] = option(
        "system to run; repeat for several (all of a case; else colocated, static and elastic)",
        (),
        name="--system",
        read=lambda known: (
            tuple(known.systems) or (() if known.colocated is None else ("colocated",))
        ),
    )
    policy: str | None = option("policy of migration", None, metavar="NAME")
    profile: str | None = option(
        f"device and model: a name, or a .toml file ({DEFAULT_PROFILE}; of a case: its own)", None
    )
    prefill: int | None = derived(
        None,
        lambda known: (known.pd or (None, None))[0],
        extra(
            "--pd",
            "prefill and decode instances; the colocated system has as many in all (2:2)",
            kind=_parse_pd,
            metavar="P:D",
        ),
    )
    decode: int | None = derived(None, lambda known: (known.pd or (None, None))[1])
    instances: int | None = option(
        "N instances that begin as both; the static system splits them in halves",
        None,
        int,
        rule=AT_LEAST_1,
        read=_instances,
        also=(
            extra(
                "--colocated",
                "N instances that do both; without --system the colocated system alone",
                None,
                int,
                rule=AT_LEAST_1,
            ),
        ),
    )
    slo_ttft_s: float | None = option(
        "longest time to first token of a request that is served well (2; of a case: its own)",
        None,
        float,
    )
    slo_tpot_s: float | None = option(
        "longest mean time of an output token after the first (0.1; of a case: its own)",
        None,
        float,
    )
    rps: float | None = option("mean number of requests per second", None, float)
    arrivals: str | None = option(
        f"{', '.join(ARRIVALS)} (trace if the load has times; else poisson)", None
    )
    duration_s: float | None = option(
        f"time in which drawn requests arrive ({DEFAULT_DURATION_S:g})", None, float
    )
    variation: float | None = option(
        "coefficient of variation of the gaps, with --arrivals bursts (4)", None, float
    )
    swing_fraction: float | None = option(
        "swing of the rate with --arrivals diurnal, from 0 to below 1 (0.8)",
        None,
        float,
        name="--swing",
    )
    speed: float | None = option("factor by which a trace runs faster (1)", None, float)
    limit: int | None = option("number of requests of a trace that are used (all)", None, int)
    max_output_tokens: int | None = option(
        "length at which longer answers are cut, for lengths that are drawn", None, int
    )


@dataclass(frozen=True, slots=True)
class SimulationJob:
    """Systems and load of one simulation.

    Attributes:
        requests: Function that yields the requests of a seed.
        expected_requests: Approximate number of requests, for a progress bar.
        is_drawn: True if another seed gives other requests.
        seed: First seed if none is asked for.
        case: Case whose goals are checked; None for none.
    """

    name: str
    about: str
    profile: Profile
    systems: Mapping[str, System]
    requests: Callable[[int], Iterator[SimRequest]]
    expected_requests: int
    limits: LatencyLimits
    is_drawn: bool = True
    events: tuple[Event, ...] = ()
    seed: int = 0
    case: Case | None = None


def job(asked: AskedSystem, profile: Profile | None = None) -> SimulationJob:
    """Return the job that ``asked`` describes; everything is read and checked, nothing has run.

    Args:
        profile: Device and model; None for those that ``asked`` or its case names.

    Raises:
        UserError: The target or an option is unknown, a file has a bad line, or an option has no
            meaning for this target.
    """
    if asked.policy is not None:
        check_known("policy", asked.policy, migrations.names())
    if asked.arrivals is not None:
        check_known("kind of arrivals", asked.arrivals, ARRIVALS)
    target = asked.target
    if (asked.prompt_lengths is None) != (asked.output_lengths is None):
        raise UserError("give both --prompt-tokens and --output-tokens")
    if not target and asked.prompt_lengths is None:
        raise UserError(
            "give a case, a trace or a dataset (see `banaserve simulate --list`), or "
            "--prompt-tokens, --output-tokens and --rps"
        )
    if target and asked.prompt_lengths is not None:
        raise UserError(f"give {target} or --prompt-tokens, not both")
    if target.endswith(".toml") or target in cases.names():
        return _of_case(asked, cases.read(target), profile)
    is_load = not target or target in DATASETS or target.endswith(_FILES)
    if not is_load and not Path(target).is_file():
        check_known("case, trace or dataset", target, [*cases.names(), *DATASETS])
    return _of_load(asked, profile)


def _of_case(asked: AskedSystem, case: Case, profile: Profile | None) -> SimulationJob:
    load = ("rps", "arrivals", "duration_s", "speed", "limit", "max_output_tokens", "tokenizer")
    for name in (*load, "variation", "swing_fraction", "prefill", "decode", "instances"):
        if getattr(asked, name) is not None:
            option = "pd" if name in ("prefill", "decode") else name.removesuffix("_s")
            option = option.removesuffix("_fraction").replace("_", "-")
            raise UserError(f"--{option} has no effect on a case: leave it out")
    for name in asked.systems:
        check_known(f"system of the case {case.name}", name, case.systems)
    limits = _limits(asked, case.limits)
    profile_name = asked.profile or case.profile_name
    systems = {
        name: _with_policy(system, asked.policy, profile_name, limits)
        for name, system in case.systems.items()
        if not asked.systems or name in asked.systems
    }
    return SimulationJob(
        case.name,
        case.about,
        profile or (profiles.load(asked.profile) if asked.profile else case.profile),
        systems,
        case.requests,
        case.expected_requests,
        limits,
        events=case.events,
        seed=case.seed,
        case=case,
    )


def _with_policy(
    system: System, policy: str | None, profile_name: str, limits: LatencyLimits
) -> System:
    """Return ``system`` with another migration policy, if its own policy moves anything."""
    if system.migration == "still" or policy in (None, system.migration):
        return system
    if policy == "elastic":
        return following(system, profile_name, limits.ttft_s, limits.tpot_s)
    return replace(system, migration=policy, migration_options={})


def _limits(asked: AskedSystem, usual: LatencyLimits) -> LatencyLimits:
    return LatencyLimits(
        _given(asked.slo_ttft_s, usual.ttft_s), _given(asked.slo_tpot_s, usual.tpot_s)
    )


def _of_load(asked: AskedSystem, profile: Profile | None) -> SimulationJob:
    profile = profile or profiles.load(asked.profile or DEFAULT_PROFILE)
    for name in asked.systems:
        check_known("system", name, KINDS)
    requests, expected, about, is_drawn = _load(asked, profile)
    return SimulationJob(
        Path(asked.target).name or "lengths",
        about,
        profile,
        {name: _system(name, asked) for name in asked.systems or _EVERY_SYSTEM},
        requests,
        expected,
        _limits(asked, LatencyLimits()),
        is_drawn,
    )


def _system(name: str, asked: AskedSystem) -> System:
    """Return one of ``KINDS`` with the instances asked for, by default 2 of each role."""
    begin_as_both = asked.instances is not None
    total = _INSTANCES if asked.instances is None else asked.instances
    prefill = total // 2 if asked.prefill is None else asked.prefill
    decode = total - total // 2 if asked.decode is None else asked.decode
    if name == "static" and begin_as_both and total < 2:
        raise UserError("the static system needs 2 instances or more: name others with --system")
    if name == "colocated" or (name == "elastic" and asked.prefill is None):
        system = preset(name, colocated=total if asked.prefill is None else prefill + decode)
    elif name == "banaserve" and begin_as_both:
        system = preset(name, colocated=total)
    else:
        system = preset(name, prefill=prefill, decode=decode)
    limits = _limits(asked, LatencyLimits())
    profile_name = asked.profile or DEFAULT_PROFILE
    if name == "elastic":
        system = following(system, profile_name, limits.ttft_s, limits.tpot_s)
    return _with_policy(system, asked.policy, profile_name, limits)


def _load(
    asked: AskedSystem, profile: Profile
) -> tuple[Callable[[int], Iterator[SimRequest]], int, str, bool]:
    kind = asked.arrivals or ("trace" if _has_times(asked) else "poisson")
    most = profile.model.max_context_tokens
    if asked.variation is not None and kind != "bursts":
        raise UserError(f"--variation has no effect on {kind} arrivals: give --arrivals bursts")
    if asked.swing_fraction is not None and kind != "diurnal":
        raise UserError(f"--swing has no effect on {kind} arrivals: give --arrivals diurnal")
    if kind == "trace":
        for name in ("duration_s", "max_output_tokens", "tokenizer"):
            if getattr(asked, name) is not None:
                option = name.removesuffix("_s").replace("_", "-")
                raise UserError(f"--{option} has no effect on a trace's own arrivals: use --limit")
        rows = _trace(asked)
        speed = _speed(asked, rows)
        check_duration(lasts_s := rows[-1].at_s / speed)
        num_cut = sum(row.prompt_tokens + row.output_tokens > most for row in rows)
        about = f"{len(rows)} requests in {lasts_s:.0f} s"
        if num_cut:
            about += f", {num_cut} of them cut to the model's context of {most} tokens"
        return lambda seed: requests_of(rows, speed, most), len(rows), about, False
    if asked.rps is None:
        why = "" if asked.target in ("", *DATASETS) else f"{asked.target} has no times: "
        raise UserError(f"{why}give the mean rate of the arrivals with --rps")
    if asked.speed is not None:
        raise UserError("--speed has no effect on drawn arrivals: use --rps")
    if asked.limit is not None:
        raise UserError("--limit has no effect on drawn arrivals: use --duration")
    arrivals = Arrivals(
        duration_s=_given(asked.duration_s, DEFAULT_DURATION_S),
        rate_per_s=asked.rps,
        variation=_given(asked.variation, 4.0) if kind == "bursts" else 1.0,
        swing_fraction=_given(asked.swing_fraction, 0.8) if kind == "diurnal" else 0.0,
    )
    pair = _pair(asked)
    expected = round(arrivals.rate_per_s * arrivals.duration_s)
    about = f"{kind} arrivals, {arrivals.rate_per_s:g} a second for {arrivals.duration_s:g} s"
    draws = Random(0)
    if share := sum(sum(pair(draws)) > most for _ in range(_DRAWN)) / _DRAWN:
        about += f", about {share:.1%} of them cut to the model's context of {most} tokens"
    return lambda seed: arriving(arrivals, pair, seed, most), expected, about, True


def _given(value: float | None, usual: float) -> float:
    return usual if value is None else value


def _has_times(asked: AskedSystem) -> bool:
    """Return whether the first request has an arrival; the rest is checked when it is read."""
    if asked.target in ("", *DATASETS):
        return False
    first = next(trace_records(Path(asked.target)), None)
    if first is None:
        raise UserError(f"{asked.target} holds no request")
    return has_time(first[1])


def _trace(asked: AskedSystem) -> list[Arrival]:
    if asked.target in ("", *DATASETS):
        has_none = f"{asked.target or '--prompt-tokens'} has no arrivals"
        raise UserError(f"{has_none}: give poisson, bursts or diurnal")
    if asked.limit is not None and asked.limit < 1:
        raise UserError(f"limit is {asked.limit}: give 1 or more")
    return read_trace(Path(asked.target), asked.limit)


def _speed(asked: AskedSystem, rows: Sequence[Arrival]) -> float:
    if asked.rps is None:
        speed = 1.0 if asked.speed is None else asked.speed
        if not speed > 0:
            raise UserError(f"speed is {speed}: give more than 0")
        return speed
    if asked.speed is not None:
        raise UserError("give one of rps and speed")
    if not asked.rps > 0 or not rows[-1].at_s > 0:
        raise UserError("a trace is stretched to a rate above 0 if it lasts longer than 0 s")
    return asked.rps * rows[-1].at_s / len(rows)


def _pair(asked: AskedSystem) -> Pair:
    """Return the function that draws the lengths of a request."""
    most = asked.max_output_tokens
    if most is not None and most < 1:
        raise UserError(f"max-output-tokens is {most}: give 1 or more")
    if asked.tokenizer is not None and asked.target in ("", *DATASETS):
        raise UserError("--tokenizer has no effect on lengths: it is for a file of texts")
    if asked.target in DATASETS:
        return partial(_of_dataset, asked.target, most or 1_000_000)
    if asked.prompt_lengths is not None and asked.output_lengths is not None:
        return partial(_of_lengths, asked.prompt_lengths, asked.output_lengths, most or 1_000_000)
    count = None if asked.tokenizer is None else token_counter(asked.tokenizer)
    pairs = [
        (prompt, min(output, most or output))
        for prompt, output in read_lengths(Path(asked.target), count)
    ]
    return lambda draws: draws.choice(pairs)


def _of_dataset(name: str, most: int, draws: Random) -> tuple[int, int]:
    prompt = round(draw_measured(f"{name}_prompt", draws))
    return prompt, min(most, round(draw_measured(f"{name}_output", draws)))


def _of_lengths(prompt: Lengths, output: Lengths, most: int, draws: Random) -> tuple[int, int]:
    return prompt.draw(draws), min(most, output.draw(draws))
