"""Whole runs of split and of aggregated engines in aiconfigurator-core."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.silicon import is_fitted
from benchmarks.whole_runs import number, silicon_rows

_NODE_GPUS = 8
"""GPUs of a machine; an aggregated engine is on one."""
_CLIENTS = re.compile(r"silicon_concurrency=(\d+)")
_DUMP = "db-dump/"
"""Start of the source of rows that tell the number of workers and leave out draft tokens."""


class EngineShape(NamedTuple):
    """Parallelism of one engine.

    Attributes:
        tensor_parallel: GPUs that share the attention of a request.
        data_parallel: Groups of such GPUs, each with requests of its own.
        expert_parallel: Parts into which the experts are divided, whole ones in each.
    """

    tensor_parallel: int
    data_parallel: int
    expert_parallel: int

    @property
    def num_gpus(self) -> int:
        return self.tensor_parallel * self.data_parallel

    @property
    def kind(self) -> str:
        """What kernels the engine runs: attention and experts divided in the same way or not."""
        if self.data_parallel > 1:
            return "data"
        return "experts" if self.expert_parallel > 1 else "tensor"


class EngineGroup(NamedTuple):
    """Engines of one shape."""

    number: int
    shape: EngineShape

    @property
    def num_gpus(self) -> int:
        return self.number * self.shape.num_gpus


class ServedRun(NamedTuple):
    """A run and the means that its clients measured, in seconds.

    Attributes:
        prefill: Engines that only compute prompts; None if all engines do both.
        engines: Engines that decode.
        clients: Number of clients, each of which has one request at a time.
    """

    id: str
    backend: str
    version: str
    model: str
    gpu: str
    precision: str
    prompt_tokens: int
    output_tokens: int
    prefill: EngineGroup | None
    engines: EngineGroup
    clients: int
    ttft_s: float
    tpot_s: float

    @property
    def is_split(self) -> bool:
        return self.prefill is not None

    @property
    def is_even(self) -> bool:
        """True if the hash of the run's configuration is even."""
        engines = [] if self.prefill is None else [self.prefill]
        of_engines = [(group.number, *group.shape) for group in (*engines, self.engines)]
        return is_fitted(repr((*self[1:8], *of_engines, self.clients)))

    @property
    def stack(self) -> tuple[str, ...]:
        """Backend, model, GPU and precision."""
        return (self.backend, *self[3:6])

    @property
    def group(self) -> tuple[Any, ...]:
        """What comparable runs have in common: the stack and the lengths."""
        return (*self.stack, self.prompt_tokens, self.output_tokens)

    @property
    def num_gpus(self) -> int:
        return self.engines.num_gpus + (self.prefill.num_gpus if self.prefill else 0)

    def rate(self, ttft_s: float, tpot_s: float) -> float:
        """Return the output tokens per second and GPU of this closed loop with these means.

        Each client always has one request under way, so the rate follows from a request's latency.
        """
        latency_s = ttft_s + (self.output_tokens - 1) * tpot_s
        return self.clients * self.output_tokens / latency_s / self.num_gpus


def comparable(runs: Sequence[ServedRun]) -> Mapping[tuple[Any, ...], Sequence[ServedRun]]:
    """Return the groups of runs that have both kinds."""
    groups: dict[tuple[Any, ...], list[ServedRun]] = defaultdict(list)
    for run in runs:
        groups[run.group].append(run)
    kinds = {group: {run.is_split for run in of} for group, of in groups.items()}
    return {group: of for group, of in sorted(groups.items()) if len(kinds[group]) == 2}


def read_runs() -> list[ServedRun]:
    """Return the package's runs of which the number of GPUs and of clients are known.

    Raises:
        UserError: The package is not installed.
    """
    runs = [_run(row) for row in silicon_rows() if _is_usable(row)]
    return list({run[1:]: run for run in runs}.values())


def _is_usable(row: dict[str, str]) -> bool:
    return row["silicon_data_source"].startswith(_DUMP) and int(row["pp_size"] or 1) == 1


def _run(row: dict[str, str]) -> ServedRun:
    is_split = row["mode"] == "disagg"
    clients = _CLIENTS.search(row["silicon_data_source"])
    return ServedRun(
        row["id"],
        row["backend"],
        row["backend_version"],
        row["model_path"],
        row["system"],
        row["precision"],
        int(row["isl"]),
        int(row["osl"]),
        _workers(row, "prefill_") if is_split else None,
        _workers(row, "decode_") if is_split else EngineGroup(1, _shape(row, "")),
        int(clients.group(1)) if clients else 0,
        float(row["silicon_ttft_ms"]) / 1e3,
        float(row["silicon_tpot_ms"]) / 1e3,
    )


def _workers(row: dict[str, str], role: str) -> EngineGroup:
    return EngineGroup(int(row[f"{role}num_workers"]), _shape(row, role))


def _shape(row: dict[str, str], role: str) -> EngineShape:
    tensor, data, experts, of_experts = (
        number(row, f"{role}{key}")
        for key in ("tp_size", "attention_dp_size", "moe_ep_size", "moe_tp_size")
    )
    if experts * of_experts > _NODE_GPUS:
        # The number of GPUs is multiplied by the parts of the experts: 64 for 8 with 8 parts.
        tensor, data = (tensor // experts, data) if data == 1 else (tensor, data // experts)
    # Rows of data-parallel engines come in pairs with and without whole experts, with the same
    # figures: such engines have whole experts.
    return EngineShape(tensor, data, tensor * data if data > 1 else experts)
