"""``banaserve bench cases``: the simulator's cases on paced engines, and whether goals are reached.

Every system of a case gets the same requests, once in the simulator and once as real engines whose
time is modelled; answers of a sample are compared with those of one engine of vLLM's own.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from banaserve.arguments import Parser
from banaserve.bench import result
from banaserve.bench.cases_answers import num_equal, sampled
from banaserve.bench.cases_run import Asked, Run, run_system
from banaserve.bench.provenance import ModelledTime, commit
from banaserve.bench.servers import end_on_sigterm
from banaserve.errors import UserError
from banaserve.names import check_known
from banaserve.sim import case as cases
from banaserve.sim.case import Case
from banaserve.sim.run import judged, simulate

DEFAULT_CASES = ("prefill-flood", "decode-flood", "oscillating-load")
PUBLISHED = "published"
"""A system beside those of the case: banaserve with the preset of that name."""
_UNITS = {
    "goodput_fraction": "fraction",
    "ttft_p50_s": "modelled s",
    "ttft_p99_s": "modelled s",
    "tpot_p50_s": "modelled s",
    "tpot_p99_s": "modelled s",
    "e2e_p99_s": "modelled s",
    "total_s": "modelled s",
    "num_moves": "steps",
    "equal_fraction": "fraction",
    "overrun_fraction": "fraction",
}
_NOTES = (
    "paced: real engines, store, router, migrations and control loop; steps, transfers and "
    "the control loop's seconds are modelled ones",
    "simulated: the same requests through the simulator; its static systems pull KV, real "
    "ones hand it over through the store",
    "goodput_fraction: requests within the case's limits of TTFT and TPOT",
    "equal_fraction: of a sample, answers that are those of one engine of vLLM's own",
    "commit and start of each run stand beside it in raw",
)
_Found = dict[str, dict[str, Any]]


def main(argv: Sequence[str]) -> int:
    """Run it and write the result; 1 where a goal is missed or an answer differs."""
    given = _parse(argv)
    end_on_sigterm()
    began = datetime.now(UTC)
    found = _kept(given.json)
    for name in given.case:
        for system in _systems(given, _cut(given, name)):
            found[name] = _with_system(given, _cut(given, name), system, found.get(name))
            record = _result(given, began, found)
            if given.json is not None:
                result.write(record, given.json)  # the next one takes minutes
    result.deliver(record, given.json)
    return 0 if all(_is_good(found[name]) for name in given.case) else 1


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="banaserve bench cases", description=__doc__)
    add = parser.add_argument
    add("case", nargs="*", help=f"names, or .toml files ({', '.join(DEFAULT_CASES)})")
    add("--json", type=Path, help="write the result there; what it holds of others is kept")
    add("--system", action="append", help=f"of the case, or {PUBLISHED}; several times; else all")
    add("--dilate", type=float, default=4.0, metavar="N", help="wall seconds of a modelled one")
    add("--phase-s", type=float, metavar="S", help="cut each phase to so many modelled seconds")
    add("--repeat", type=int, metavar="N", help="repeat the phases so often")
    add("--seed", type=int, help="of the requests; the case's own")
    add("--sample", type=int, default=12, help="answers to compare with one engine's")
    given = parser.parse_args(list(argv))
    given.case = given.case or list(DEFAULT_CASES)
    for name, least in (("dilate", 0.1), ("sample", 1), ("repeat", 1), ("phase_s", 1.0)):
        value = getattr(given, name)
        if value is not None and value < least:
            raise UserError(f"--{name.replace('_', '-')} {value:g}: give {least:g} or more")
    for name in given.case:
        _systems(given, _cut(given, name))  # a wrong name stops before anything runs
    return given


def _cut(given: argparse.Namespace, name: str) -> Case:
    case = cases.read(name)
    if case.events:
        raise UserError(f"case {name} has events, which only the simulator can make happen")
    phases = case.phases
    if given.phase_s is not None:
        phases = tuple(replace(p, duration_s=min(p.duration_s, given.phase_s)) for p in phases)
    seed = case.seed if given.seed is None else given.seed
    return replace(case, phases=phases, repeat=given.repeat or case.repeat, seed=seed)


def _systems(given: argparse.Namespace, case: Case) -> dict[str, Any]:
    systems = dict(case.systems)
    if "banaserve" in systems:
        moved = systems["banaserve"]
        systems[PUBLISHED] = replace(moved, migration="published", migration_options={})
    for name in given.system or ():
        check_known(f"system of case {case.name}", name, systems)
    wanted = given.system or case.systems
    return {name: systems[name] for name in wanted}


def _with_system(
    given: argparse.Namespace, case: Case, system_name: str, before: dict[str, Any] | None
) -> dict[str, Any]:
    """Runs one system; returns its case with what is known of others under the same load."""
    system = _systems(given, case)[system_name]
    load = {
        "phase_s": [phase.duration_s for phase in case.phases],
        "repeat": case.repeat,
        "seed": case.seed,
        "dilation": given.dilate,
    }
    is_same = before is not None and before["load"] == load
    paced: _Found = dict(before["paced"]) if before is not None and is_same else {}
    simulated: _Found = dict(before["simulated"]) if before is not None and is_same else {}
    simulated[system_name] = simulate(case.profile, system, case.requests(case.seed), case.limits)
    asked = [Asked.of(request, case.seed) for request in case.requests(case.seed)]
    began = datetime.now(UTC)
    ran = asyncio.run(run_system(case.profile, system, asked, given.dilate, case.limits))
    paced[system_name] = _told(given, case, asked, ran, began)
    return {
        "load": load,
        "paced": paced,
        "simulated": simulated,
        "goals": {
            "paced": judged(case, case.seed, paced)["goals"],
            "simulated": judged(case, case.seed, simulated)["goals"],
        },
    }


def _told(
    given: argparse.Namespace, case: Case, asked: Sequence[Asked], ran: Run, began: datetime
) -> dict[str, Any]:
    places = sampled(len(asked), given.sample)
    answers = [(asked[n].prompt, ran.records[n].token_ids) for n in places]
    equal = num_equal(case.profile, answers)
    commit_id, dirty = commit()
    return {
        **ran.figures,
        "equal_fraction": equal / len(places),
        "num_compared": len(places),
        "decisions": ran.decisions,
        "modelled_time": msgspec.to_builtins(ran.modelled_time),
        "commit": commit_id,
        "dirty": dirty,
        "started_at": began.isoformat(timespec="seconds"),
    }


def _is_good(found: Mapping[str, Any]) -> bool:
    goals = all(goal["is_reached"] for goal in found["goals"]["paced"])
    return goals and all(one["equal_fraction"] == 1.0 for one in found["paced"].values())


def _kept(path: Path | None) -> dict[str, Any]:
    """What an earlier result holds, by case; empty where there is none."""
    if path is None or not path.exists():
        return {}
    kept = result.read(path)
    if kept.name != "cases":
        raise UserError(f"{path} is a result of bench {kept.name}: give another file")
    return dict(kept.raw["cases"])


def _result(
    given: argparse.Namespace, began: datetime, found: Mapping[str, dict[str, Any]]
) -> result.Result:
    figures = {}
    modelled = []
    for case, one in found.items():
        for system, told in one["paced"].items():
            modelled.append(msgspec.convert(told["modelled_time"], ModelledTime))
            for metric, unit in _UNITS.items():
                figures[f"{case}.{system}.{metric}"] = result.figure([told[metric]], unit)
            simulated = one["simulated"][system]["goodput_fraction"]
            name = f"{case}.{system}.goodput_fraction_simulated"
            figures[name] = result.figure([simulated], "fraction")
    return result.result(
        "cases",
        seed=0 if given.seed is None else given.seed,
        options={name: value for name, value in vars(given).items() if name != "json"},
        started_at=began,
        figures=figures,
        notes=_NOTES,
        raw={"cases": dict(found)},
        modelled_time=modelled,
    )
