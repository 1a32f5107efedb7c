"""Splitwise's measured times of prompts and tokens, beside sums of aiconfigurator-core's operators.

    python -m benchmarks silicon-table --table perf_model.csv.zst [--json FILE]

The rows are of a vLLM of 2023 with one batch of equal requests: the time of all their prompts, and
of a token of each. Beside the median of a configuration's rows stand the sum of operators of
today's vLLM for the same model, GPU and tensor parallel size, and that sum with constants: a
factor, a least time of a step, and of tokens a time for each request. Each model and GPU has such
constants for prompts and for tokens, at any tensor parallel size. They are fitted on configurations
whose hash is even; errors are of the others. No engine runs, and nothing is measured.
"""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from banaserve.base.errors import UserError
from banaserve.base.text.records import unpacked
from banaserve_bench.silicon.aiconfigurator import AiconfiguratorTimes
from banaserve_bench.silicon.linear import Floats
from banaserve_bench.silicon.step_times import GpuStepTimes
from benchmarks.measurement import Measurement, Samples, parser_of
from benchmarks.silicon import is_fitted
from benchmarks.whole_runs import nearest

_GPUS = {"a100-80gb": "a100_sxm", "h100-80gb": "h100_sxm"}
"""The package's names of GPUs; the table's others have a limit of power."""
_CONFIGS: dict[str, dict[str, Any]] = {
    "llama2-70b": {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "num_hidden_layers": 80,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
    },
    # The only architecture of the package whose MLP has no gate, without its Mamba layers.
    "bloom-176b": {
        "architectures": ["NemotronHForCausalLM"],
        "hybrid_override_pattern": "*-" * 70,
        "hidden_size": 14336,
        "intermediate_size": 57344,
        "num_attention_heads": 112,
        "num_key_value_heads": 112,
        "num_hidden_layers": 140,
        "vocab_size": 250880,
        "max_position_embeddings": 2048,
        **dict.fromkeys(("mamba_num_heads", "mamba_head_dim", "ssm_state_size"), 128),
        **dict.fromkeys(("conv_kernel", "n_groups", "chunk_size"), 8),
    },
}
_TOO_LARGE = ("llama2-70b", 2, 64)
"""Model, tensor parallel size and batch whose prompts took less than those of half the batch."""
_SIZES = {"prompt": (512, 2048), "token": (2, 8)}
"""Largest numbers of prompt tokens, and of requests, in the classes of steps."""
_UNITS = {"prompt": "prompt tokens", "token": "requests"}
_KINDS = ("summed", "fitted")
_STARTS, _FITS = 40, 10


class TableStep(NamedTuple):
    """Configuration of a step: all prompts of a batch, or a token of each request.

    Attributes:
        kind: Kind of the step, ``prompt`` or ``token``.
        output_tokens: Number of tokens of each answer; 0 for prompts, whose time has no part of it.
    """

    model: str
    gpu: str
    tensor_parallel: int
    kind: str
    batch: int
    prompt_tokens: int
    output_tokens: int

    @property
    def labels(self) -> tuple[str, str]:
        """Names of the figures that an error belongs to: by engine, and by size."""
        number = self.batch * (self.prompt_tokens if self.kind == "prompt" else 1)
        sizes = _SIZES[self.kind]
        most = next((f"to {most:,}" for most in sizes if number <= most), f"over {sizes[-1]:,}")
        of_gpu = f"{self.kind} time, {self.model}, {self.gpu}"
        return f"{of_gpu}, TP {self.tensor_parallel}", f"{of_gpu}, {most} {_UNITS[self.kind]}"

    def columns(self, times: GpuStepTimes) -> tuple[float, int]:
        """Return the sum of operators, in seconds, and the requests that take a time each."""
        n, prompt = self.batch, self.prompt_tokens
        if self.kind == "prompt":
            return times.step_s(n * prompt, n * prompt * prompt, 0, 0), 0
        # The mean token is computed after half of the answer.
        return times.step_s(0, 0, n, n * (prompt + self.output_tokens // 2)), n


class TableConstants(NamedTuple):
    """Constants of a model and GPU.

    Attributes:
        factor: Factor of summed operators.
        least_s: Least time of a step, in seconds.
        request_s: Time of each request of a step, in seconds.
    """

    factor: float = 1.0
    least_s: float = 0.0
    request_s: float = 0.0

    def step_s(self, gpu_s: Floats, requests: Floats) -> Floats:
        """Return the times of steps, in seconds."""
        return np.maximum(self.factor * gpu_s, self.least_s) + self.request_s * requests


def main(argv: Sequence[str]) -> int:
    """Compare the table's times with sums of operators, write the errors; return the exit code."""
    parser = parser_of("silicon-table", __doc__)
    parser.add_argument("--table", type=Path, required=True, help="perf_model.csv of splitwise-sim")
    given = parser.parse_args(list(argv))
    measurement = Measurement("silicon-table", given)
    groups: dict[tuple[str, ...], dict[TableStep, float]] = defaultdict(dict)
    for step, time_s in read_table(given.table).items():
        groups[step.model, step.gpu, step.kind][step] = time_s
    wrong: dict[str, list[Floats]] = defaultdict(list)
    raw = {}
    with TemporaryDirectory(prefix="bench-") as folder:
        engines = _engines(Path(folder), {step[:3] for group in groups.values() for step in group})
    for name, measured in sorted(groups.items()):
        columns = {step: step.columns(engines[step[:3]]) for step in measured}
        constants, errors = judged(measured, columns)
        raw[", ".join(name)] = {
            "constants": constants._asdict(),
            "errors": [[*step, *found] for step, found in errors.items()],
        }
        for step, found in errors.items():
            for label in step.labels:
                wrong[label].append(found)
    table = Table("steps", "number", *_KINDS, title="mean error (without signs)")
    samples: Samples = {}
    for label, rows in sorted(wrong.items()):
        found = np.array(rows)
        means = zip(found.mean(axis=0), np.abs(found).mean(axis=0), strict=True)
        table.add_row(label, str(len(rows)), *(f"{a:+.1%} ({b:.1%})" for a, b in means))
        for column, kind in enumerate(_KINDS):
            samples[f"{label}, {kind}"] = (found[:, column].tolist(), "relative error")
    Console(width=120).print(table)
    measurement.deliver(measurement.result(samples, [str(__doc__)], raw={"groups": raw}))
    return 0


def judged(
    measured: Mapping[TableStep, float], columns: Mapping[TableStep, tuple[float, int]]
) -> tuple[TableConstants, dict[TableStep, Floats]]:
    """Return the constants of the even steps and the signed errors of the odd ones: [kinds]."""
    rows = np.array([[*columns[step], time_s] for step, time_s in measured.items()]).T
    even = np.array([is_fitted(repr(tuple(step))) for step in measured])
    constants = fitted(*rows[:, even])
    gpu_s, requests, times_s = rows
    found = np.stack([gpu_s, constants.step_s(gpu_s, requests)], axis=1) / times_s[:, None] - 1
    of_steps = zip(measured, even, found.tolist(), strict=True)
    return constants, {step: error for step, is_even, error in of_steps if not is_even}


def fitted(gpu_s: Floats, requests: Floats, times_s: Floats) -> TableConstants:
    """Return the constants with the least relative errors.

    Which steps take the least time depends on the constants, so the fit begins in several places.
    """
    tried = []
    for least_s in np.linspace(0, times_s.max(), _STARTS):
        known = TableConstants(least_s=least_s)
        for _ in range(_FITS):
            is_longer = known.factor * gpu_s > known.least_s
            parts = np.stack([gpu_s * is_longer, ~is_longer, requests], axis=1)
            known = TableConstants(*nearest(parts, times_s))
            error = np.abs(known.step_s(gpu_s, requests) / times_s - 1).mean()
            tried.append((float(error), known))
    return min(tried)[1]


def _engines(folder: Path, needed: set[tuple[Any, ...]]) -> dict[tuple[Any, ...], GpuStepTimes]:
    """Return operators by model, GPU and tensor parallel size."""
    for model, config in _CONFIGS.items():
        (folder / model).mkdir()
        (folder / model / "config.json").write_text(json.dumps(config))
    return {
        (model, gpu, width): AiconfiguratorTimes(str(folder / model), _GPUS[gpu], width)
        for model, gpu, width in sorted(needed)
    }


def read_table(path: Path) -> dict[TableStep, float]:
    """Return the median time of each configuration, in seconds.

    Raises:
        UserError: The file cannot be read, or lacks a column or rows.
    """
    times: dict[TableStep, list[float]] = defaultdict(list)
    try:
        for row in csv.DictReader(unpacked(path).decode().splitlines()):
            model, gpu, width = row["model"], row["hardware"], int(row["tensor_parallel"])
            batch, prompt = int(row["batch_size"]), int(row["prompt_size"])
            if gpu not in _GPUS or model not in _CONFIGS or (model, width, batch) == _TOO_LARGE:
                continue
            for kind, outputs in (("prompt", 0), ("token", int(row["token_size"]))):
                step = TableStep(model, gpu, width, kind, batch, prompt, outputs)
                times[step].append(float(row[f"{kind}_time"]) / 1e3)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: a row lacks a value: {error}") from error
    if not times:
        raise UserError(f"{path} has no row of a known model and GPU")
    return {step: float(np.median(found)) for step, found in times.items()}
