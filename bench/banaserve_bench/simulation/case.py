"""Scenario cases: a state, a workload, events and a goal that is checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import msgspec

from banaserve.base.errors import UserError
from banaserve.base.text.names import check_known
from banaserve.orchestrator.control.costs.profile import Profile, check_keys, load, read_toml
from banaserve.sim.request import SimRequest
from banaserve.sim.result import LatencyLimits
from banaserve.sim.system import KINDS, System, following, preset
from banaserve_bench.simulation.events import Event
from banaserve_bench.simulation.workload import Lengths, LoadPhase, drawn

BUILT_IN = Path(__file__).parent / "cases"

METRICS = (
    "busy_fraction",
    "cache_hit_fraction",
    "e2e_mean_s",
    "e2e_p99_s",
    "finished_fraction",
    "goodput_fraction",
    "num_moves",
    "num_moves_aborted",
    "num_preemptions",
    "num_rebalanced",
    "num_restarted",
    "output_tokens_per_s",
    "total_s",
    "tpot_mean_s",
    "tpot_p99_s",
    "ttft_mean_s",
    "ttft_p99_s",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """Goal that a system must reach.

    Attributes:
        relative_to: Name of a second system; the goal then bounds the ratio of the two values.
    """

    system: str
    metric: str
    at_least: float | None = None
    at_most: float | None = None
    relative_to: str | None = None

    def __post_init__(self) -> None:
        check_known("metric of a goal", self.metric, METRICS)
        if (self.at_least is None) == (self.at_most is None):
            raise UserError(f"goal on {self.metric}: give one of at_least and at_most")

    def value(self, results: Mapping[str, Mapping[str, Any]]) -> float:
        """Return the metric, or its ratio, in the results of all systems."""
        own = float(results[self.system][self.metric])
        if self.relative_to is None:
            return own
        other = float(results[self.relative_to][self.metric])
        return own / other if other else float("inf")

    def is_reached(self, value: float) -> bool:
        if self.at_least is not None:
            return value >= self.at_least
        assert self.at_most is not None
        return value <= self.at_most


@dataclass(frozen=True, slots=True)
class Case:
    """Scenario, with the systems that are sent through it.

    Attributes:
        profile_name: Name or file of ``profile``.
    """

    name: str
    about: str
    profile: Profile
    profile_name: str
    seed: int
    repeat: int
    limits: LatencyLimits
    phases: tuple[LoadPhase, ...]
    systems: Mapping[str, System]
    events: tuple[Event, ...]
    goals: tuple[Goal, ...]

    def requests(self, seed: int) -> Iterator[SimRequest]:
        """Yield the requests of the case's phases."""
        return drawn(self.phases, seed, self.repeat)

    @property
    def expected_requests(self) -> int:
        """Return the mean number of requests of a run."""
        return round(self.repeat * sum(p.rate_per_s * p.duration_s for p in self.phases))


def names() -> list[str]:
    """Return the names of the cases that come with the package."""
    return sorted(path.stem for path in BUILT_IN.glob("*.toml"))


def read(name_or_path: str) -> Case:
    """Read a built-in case by its name, or a file that ends in ``.toml``.

    Raises:
        UserError: The name is unknown, the file cannot be read, or a key is missing, unknown or
            invalid; the message names file and key. Nothing has run then.
    """
    if name_or_path.endswith(".toml"):
        path = Path(name_or_path)
    else:
        check_known("case", name_or_path, names())
        path = BUILT_IN / f"{name_or_path}.toml"
    table = read_toml(path)
    needed = ("name", "about", "profile", "seed", "phase", "systems", "goal")
    check_keys(path, "", table, (*needed, "repeat", "limits", "event"), needed)
    for key in ("seed", "repeat"):
        if not isinstance(table.get(key, 1), int) or isinstance(table.get(key), bool):
            raise UserError(f"{path}: {key} is {table[key]!r}: give a whole number")
    if table.get("repeat", 1) < 1:
        raise UserError(f"{path}: repeat is {table['repeat']}: give 1 or more")
    profile_name = str(table["profile"])
    limits = _built(path, "limits", table.get("limits", {}), LatencyLimits)
    systems = _systems(path, table["systems"], profile_name, limits)
    case = Case(
        name=str(table["name"]),
        about=str(table["about"]),
        profile=load(profile_name),
        profile_name=profile_name,
        seed=table["seed"],
        repeat=table.get("repeat", 1),
        limits=limits,
        phases=tuple(_phase(path, n, entry) for n, entry in enumerate(_list(path, table, "phase"))),
        systems=systems,
        events=tuple(
            _built(path, f"event[{n}]", entry, Event)
            for n, entry in enumerate(_list(path, table, "event"))
        ),
        goals=tuple(
            _built(path, f"goal[{n}]", entry, Goal)
            for n, entry in enumerate(_list(path, table, "goal"))
        ),
    )
    _check_names(path, case)
    return case


def _check_names(path: Path, case: Case) -> None:
    for number, goal in enumerate(case.goals):
        for system in (goal.system, goal.relative_to):
            if system is not None and system not in case.systems:
                raise UserError(f"{path}: goal[{number}] names {system}, which is no system here")
    everyone = {name for system in case.systems.values() for name, _ in system.roles()}
    for event in case.events:
        if event.instance is not None:
            check_known(f"instance in {path.name}", event.instance, everyone)


def _systems(path: Path, table: Any, profile_name: str, limits: LatencyLimits) -> dict[str, System]:
    if not isinstance(table, Mapping) or not table:
        raise UserError(f"{path}: systems is no section, or an empty one")
    systems = {}
    for name, entry in table.items():
        if not isinstance(entry, Mapping):
            raise UserError(f"{path}: systems.{name} is no section")
        settings = dict(entry)
        kind = str(settings.pop("kind", name))
        check_known(f"kind of system in {path.name}", kind, KINDS)
        for key in ("limits", "control_limits", "migration_options", "routing_options"):
            if not isinstance(settings.get(key, {}), Mapping):
                raise UserError(f"{path}: systems.{name}.{key} is no section")
        options = settings.pop("migration_options", {}) if kind == "elastic" else {}
        try:
            systems[name] = preset(kind, **settings)
            if kind == "elastic":
                told = (profile_name, limits.ttft_s, limits.tpot_s)
                systems[name] = following(systems[name], *told, **options)
        except (UserError, TypeError) as error:
            raise UserError(f"{path}: systems.{name}: {error}") from error
    return systems


def _phase(path: Path, number: int, entry: Any) -> LoadPhase:
    if isinstance(entry, Mapping):
        entry = dict(entry)
        for key in ("prompt", "output"):
            if key in entry:
                entry[key] = _built(path, f"phase[{number}].{key}", entry[key], Lengths)
    return _built(path, f"phase[{number}]", entry, LoadPhase)


def _list(path: Path, table: Mapping[str, Any], key: str) -> list[Any]:
    entries = table.get(key, [])
    if not isinstance(entries, list):
        raise UserError(f"{path}: {key} is no list: write [[{key}]]")
    if key == "phase" and not entries:
        raise UserError(f"{path}: there is no [[phase]]")
    return entries


def _built(path: Path, name: str, entry: Any, kind: type[Any]) -> Any:
    """Build ``kind`` from a table; its own errors are reported with file and section."""
    if not isinstance(entry, Mapping):
        raise UserError(f"{path}: {name} is no section")
    check_keys(path, f"{name}.", entry, tuple(field.name for field in fields(kind)))
    try:
        return msgspec.convert(entry, kind)
    except (UserError, msgspec.ValidationError) as error:
        raise UserError(f"{path}: {name}: {error}") from error
