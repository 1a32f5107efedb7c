"""Description of measured step times: a TOML file that names their source, range and error."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from banaserve.base.errors import UserError
from banaserve.orchestrator.control.costs.profile import (
    ErrorSection,
    check_keys,
    read_section,
    read_toml,
)
from banaserve_bench.silicon.aiconfigurator import PRECISIONS, AiconfiguratorTimes
from banaserve_bench.silicon.costs import EngineConstants
from banaserve_bench.silicon.operator_files import read_operators
from banaserve_bench.silicon.step_times import GpuStepTimes, graph_sizes

_SOURCES = ("files", "aiconfigurator")
_MOST = {
    "host_s": 0.1,
    "host_request_s": 0.1,
    "launch_s": 1.0,
    "steps_in_flight": 2,
}
"""Maximum of a constant; a larger one is a mistake, such as milliseconds."""


@dataclass(frozen=True, slots=True)
class ExpertsSection:
    """Experts of a model in files of operators."""

    num_experts: int
    experts_per_token: int


@dataclass(frozen=True, slots=True)
class StepTimesDescription:
    """Measured step times of one GPU and model.

    Attributes:
        source: Origin of the operators' times, and the engine that ran them.
        valid_for: Range in which the operators were measured, in words.
        judged_on: Runs that the errors are of, in words.
        way_s: Time of a request from its client to the engine, in seconds, which TTFT contains.
        way_token_s: Increase of ``way_s`` with each token of the prompt, in seconds.
    """

    name: str
    source: str
    valid_for: str
    judged_on: str
    error: ErrorSection
    constants: EngineConstants
    times: GpuStepTimes
    way_s: float = 0.0
    way_token_s: float = 0.0


def read(path: Path) -> StepTimesDescription:
    """Read the description ``path`` and the operators that it names.

    Raises:
        UserError: A file cannot be read, or a key is missing, unknown or out of range; the message
            names file and key.
    """
    table = read_toml(path)
    texts = ("name", "source", "valid_for", "judged_on")
    needed = (*texts, "error")
    check_keys(path, "", table, (*needed, "engine", *_SOURCES), required=needed)
    given = [one for one in _SOURCES if one in table]
    if len(given) != 1:
        raise UserError(f"{path}: give one of the sections {' and '.join(_SOURCES)}")
    constants = read_section(path, "engine", table.get("engine", {}), EngineConstants)
    error = read_section(path, "error", table["error"], ErrorSection)
    for key, number in asdict(constants).items():
        if number > (most := _MOST.get(key, math.inf)):
            raise UserError(f"{path}: engine.{key} is {number!r}: give at most {most:g}")
    section = table[given[0]]
    if not isinstance(section, Mapping):
        raise UserError(f"{path}: {given[0]} is no section")
    times = _of_files(path, section) if given == ["files"] else _of_package(path, section)
    title, source, valid_for, judged_on = (str(table[key]) for key in texts)
    return StepTimesDescription(title, source, valid_for, judged_on, error, constants, times)


def _of_files(path: Path, section: Mapping[str, Any]) -> GpuStepTimes:
    known = ("prefix", "num_layers", "largest_graph_tokens", "experts")
    check_keys(path, "files.", section, known, required=("prefix", "num_layers"))
    experts = None
    if "experts" in section:
        found = read_section(path, "files.experts", section["experts"], ExpertsSection)
        experts = (found.num_experts, found.experts_per_token)
    return read_operators(
        path.parent / str(section["prefix"]),
        _whole(path, "files.num_layers", section["num_layers"]),
        experts,
        graph_sizes(
            _whole(path, "files.largest_graph_tokens", section.get("largest_graph_tokens", 512))
        ),
    )


def _of_package(path: Path, section: Mapping[str, Any]) -> GpuStepTimes:
    known = ("model", "system", "tensor_parallel", "expert_parallel", *PRECISIONS)
    check_keys(path, "aiconfigurator.", section, known, required=("model", "system"))
    parallel = _whole(path, "aiconfigurator.tensor_parallel", section.get("tensor_parallel", 1))
    by_experts = section.get("expert_parallel", False)
    if not isinstance(by_experts, bool):
        raise UserError(f"{path}: aiconfigurator.expert_parallel is {by_experts!r}: give a boolean")
    precisions = {key: str(section[key]) for key in PRECISIONS if key in section}
    model, system = str(section["model"]), str(section["system"])
    return AiconfiguratorTimes(model, system, parallel, by_experts, precisions)


def _whole(path: Path, key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 100_000:
        raise UserError(f"{path}: {key} is {value!r}: give a whole number above 0")
    return value
