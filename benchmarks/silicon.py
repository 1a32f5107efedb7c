"""A real run of vLLM on a GPU, replayed in the simulator with step times of measured operators.

    python -m benchmarks silicon --run RUN.jsonl.zst --operators PREFIX_tp1 [--json FILE]

The run's requests arrive as they did (LLMServingSim's format). The files of operators tell model
and GPU, the run's own file its limits (``PREFIX_meta.yaml``, ``RUN_meta.json``), where options do
not; the KV cache has the memory that weights leave. With tensor parallelism the operators are those
of one GPU, and all-reduces are aiconfigurator-core's. Compared are operators as measured, operators
with one fitted constant, the CPU's time between two steps, and the best linear step times of the
same operators with such a constant. Constants are fitted on requests whose id has an even hash,
errors are those of the others. Both halves are of one run, so their steps are the same: an error
here bounds that of another run from below. No engine runs, and nothing is measured.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from numpy.typing import NDArray

from banaserve.base.arguments import positive
from banaserve.base.errors import UserError
from banaserve.base.text.records import read_records
from banaserve.orchestrator.control.costs.profile import (
    MemorySection,
    ModelSection,
    Profile,
    load,
)
from banaserve.orchestrator.control.costs.steps import StepCosts
from banaserve.sim.request import SimRequest
from banaserve.sim.system import preset
from banaserve_bench.plan.probe.model_shape import read_experts, read_shape
from banaserve_bench.silicon.aiconfigurator import AiconfiguratorTimes
from banaserve_bench.silicon.attention import Contexts
from banaserve_bench.silicon.costs import EngineConstants
from banaserve_bench.silicon.install import install
from banaserve_bench.silicon.linear import linear_fit
from banaserve_bench.silicon.modelled_engine import config_file
from banaserve_bench.silicon.operator_files import read_operators
from banaserve_bench.silicon.step_times import GpuStepTimes, graph_sizes
from banaserve_bench.simulation.run import tallied
from benchmarks.measurement import Measurement, Samples, parser_of

_PROFILE = "llama-3.1-8b-h100"
"""Gives what step times, shape and memory do not."""
Floats = NDArray[np.float64]
Latencies = dict[str, Floats]
MODELS = {
    "meta-llama/Llama-3.1-8B": "meta-llama/Meta-Llama-3.1-8B",
    "Qwen/Qwen3-30B-A3B-Instruct-2507": "Qwen/Qwen3-30B-A3B",
}
"""Models in aiconfigurator-core that have the shape of another one."""
GPUS = {
    "NVIDIA GeForce RTX 4090": (24_564, None),
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": (97_887, "rtx_pro_6000_server"),
}
"""Memory in MiB, and name in aiconfigurator-core, by what nvidia-smi calls the GPU."""
_NOT_PARALLEL = {
    "data_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "enable_expert_parallel": False,
}
"""Options of vLLM by their values without parallelism of that kind."""
_MEMORY_FRACTION = 0.9
_OTHER_BYTES = 1.5 * 2**30
"""Memory of activations, CUDA graphs and the driver, for steps of 2,048 tokens (estimate)."""
_HOSTS_S = tuple(round(n * 1e-4, 5) for n in range(51))
_STATISTICS = {"mean": 0.0, "p90": 90.0, "p99": 99.0}


class RealRequest(NamedTuple):
    """Request of a real run; times in seconds, after the first arrival once a run is read."""

    id: str
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    first_s: float
    last_s: float

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> RealRequest:
        """Return the request of a line in LLMServingSim's format, its times as they are there."""
        return cls(
            str(record["request_id"]),
            float(record["arrival_time"]),
            int(record["input_toks"]),
            int(record["output_toks"]),
            float(record["first_token_ts"]),
            float(record["last_token_ts"]),
        )

    @property
    def is_fitted(self) -> bool:
        """True if constants may be fitted on this request."""
        return is_fitted(self.id)


def is_fitted(name: str) -> bool:
    """Return whether constants may be fitted on what has this id, since its hash is even."""
    return sha256(name.encode()).digest()[-1] % 2 == 0


class LinearTimes:
    """A profile's own linear step times (``GpuStepTimes``)."""

    def __init__(self, profile: Profile) -> None:
        self._costs = StepCosts(profile)

    def step_s(
        self, tokens: int, pairs: int, batch: int, context: int, contexts: Contexts | None = None
    ) -> float:
        """Return the time of one step; see ``GpuStepTimes``."""
        return self._costs.mixed_s(tokens, pairs, batch, context)[0]


class WithAllReduces:
    """Step times of one of several GPUs, and the all-reduces between them (``GpuStepTimes``)."""

    def __init__(self, times: GpuStepTimes, package: AiconfiguratorTimes) -> None:
        self._times, self._package = times, package

    def step_s(
        self, tokens: int, pairs: int, batch: int, context: int, contexts: Contexts | None = None
    ) -> float:
        """Return the time of one step; see ``GpuStepTimes``."""
        alone_s = self._times.step_s(tokens, pairs, batch, context, contexts)
        return alone_s + self._package.all_reduces_s(tokens + batch)


class RecordedTimes:
    """Step times that note each different step that was asked for, with its time."""

    def __init__(self, times: GpuStepTimes) -> None:
        self._times = times
        self.steps: dict[tuple[int, int, int, int], float] = {}

    def step_s(
        self, tokens: int, pairs: int, batch: int, context: int, contexts: Contexts | None = None
    ) -> float:
        """Return the time of one step; see ``GpuStepTimes``."""
        step = (tokens, pairs, batch, context)
        self.steps[step] = found = self._times.step_s(*step, contexts)
        return found


class RunReplay:
    """The run's requests and engine, for any step times."""

    def __init__(
        self, run: Sequence[RealRequest], profile: Profile, limits: dict[str, int]
    ) -> None:
        self._run, self._profile = run, profile
        self._system = preset("colocated", colocated=1, cache="none", limits=limits)
        self.real = _latencies(
            [one.arrival_s for one in run],
            [one.first_s for one in run],
            [one.last_s for one in run],
            [one.output_tokens for one in run],
        )
        self.fitted = np.array([one.is_fitted for one in run])

    def simulated(self, times: GpuStepTimes, host_s: float, steps_in_flight: int = 2) -> Latencies:
        """Return the latencies of all requests with these step times."""
        constants = EngineConstants(host_s, steps_in_flight=steps_in_flight)
        requests = [
            SimRequest(n, one.arrival_s, one.prompt_tokens, one.output_tokens)
            for n, one in enumerate(self._run)
        ]
        tallied(
            self._profile,
            self._system,
            requests,
            watch=lambda cluster: install(cluster, self._profile, times, constants),
        )
        return _latencies(
            [one.arrival_s for one in requests],
            [one.first_s for one in requests],
            [one.end_s for one in requests],
            [one.output_tokens for one in requests],
        )

    def fit(self, times: GpuStepTimes) -> float:
        """Return the CPU's time between steps with the least error of the means, in seconds."""
        losses = []
        for host_s in _HOSTS_S:
            found = errors(self.simulated(times, host_s), self.real, self.fitted)
            means = (found[f"{name}_mean"] for name in self.real)
            losses.append((sum(error**2 for error in means), host_s))
        return min(losses)[1]


def main(argv: Sequence[str]) -> int:
    """Replay the run with each kind of step times and write the errors; return the exit code."""
    parser = parser_of("silicon", __doc__)
    add = parser.add_argument
    add("--run", type=Path, required=True, help="requests of a real run, in JSON lines")
    add("--operators", type=Path, required=True, help="folder and prefix of operators' files")
    add("--model", help="folder with a config.json, or name in aiconfigurator-core")
    add("--gpu-memory", type=positive, metavar="MIB", help="memory of the GPU, by nvidia-smi")
    add("--layers", type=positive, help="layers of the model, if not those of its config.json")
    add("--tensor-parallel", type=positive, metavar="N", help="GPUs of the run's engine")
    add("--max-requests", type=positive, help="max_num_seqs of the run")
    add("--step-tokens", type=positive, help="max_num_batched_tokens of the run")
    add("--graph-tokens", type=positive, default=256, help="largest CUDA graph of the run")
    add("--system", help="GPU in aiconfigurator-core, whose operators are compared")
    given = with_told(parser.parse_args(list(argv)))
    measurement = Measurement("silicon", given)
    config = config_file(given.model)
    shape = read_shape(config)
    if given.layers is not None:
        shape = replace(shape, num_layers=given.layers)
    memory = MemorySection(kv_tokens(shape, given.gpu_memory, given.tensor_parallel))
    profile = replace(load(_PROFILE), model=shape, memory=memory)
    limits = {"step_tokens": given.step_tokens, "max_requests": given.max_requests}
    replay = RunReplay(read_run(given.run), profile, limits)
    figures: dict[str, float] = {}
    for name, (times, host_s) in _compared(given, replay, profile, read_experts(config)).items():
        found = errors(replay.simulated(times, host_s), replay.real, ~replay.fitted)
        figures[f"{name}_host_s"] = host_s
        figures |= {f"{name}_{key}": value for key, value in found.items()}
    samples: Samples = {
        name: ([value], "s" if name.endswith("_host_s") else "relative error")
        for name, value in figures.items()
    }
    measurement.deliver(measurement.result(samples, [str(__doc__)]))
    return 0


def with_told(given: argparse.Namespace) -> argparse.Namespace:
    """Return ``given`` with what files beside run and operators tell, where options do not.

    Raises:
        UserError: Neither tells model, memory or a limit, or the run is of a kind of parallelism
            that is not replayed.
    """
    of_gpu = _told(given.operators, r"_tp\d+", "_meta.yaml")
    of_run = _told(given.run, r"\.jsonl(\.zst)?", "_meta.json").get("engine_kwargs", {})
    for name, usual in _NOT_PARALLEL.items():
        if (value := of_run.get(name, usual)) != usual:
            raise UserError(f"{given.run}: {name} is {value}: only tensor parallelism is replayed")
    memory_mib, system = GPUS.get(str(of_gpu.get("gpu")), (None, None))
    model = of_gpu.get("model")
    told = {
        "model": MODELS.get(str(model), model),
        "gpu_memory": memory_mib,
        "tensor_parallel": of_run.get("tensor_parallel_size", 1),
        "max_requests": of_run.get("max_num_seqs"),
        "step_tokens": of_run.get("max_num_batched_tokens"),
    }
    for name, value in told.items():
        if getattr(given, name) is None:
            if value is None:
                raise UserError(f"no file says it: give --{name.replace('_', '-')}")
            setattr(given, name, value)
    given.system = given.system or system
    of_files = re.search(r"_tp(\d+)$", given.operators.name)
    if of_files and int(of_files[1]) != given.tensor_parallel:
        raise UserError(
            f"{given.operators.name} is no prefix of operators with tensor parallel size "
            f"{given.tensor_parallel}, which the run had"
        )
    if given.tensor_parallel > 1 and given.system is None:
        raise UserError("all-reduces of a run on several GPUs need the GPU's name: give --system")
    return given


def _told(path: Path, end: str, instead: str) -> dict[str, Any]:
    """Return the fields of a file whose name ends otherwise than ``path``; none if it is absent."""
    path = path.with_name(re.sub(f"{end}$", "", path.name) + instead)
    if not path.exists():
        return {}
    found = yaml.safe_load(path.read_text())  # JSON is YAML
    if not isinstance(found, dict):
        raise UserError(f"{path} holds no fields")
    return found


def kv_tokens(shape: ModelSection, memory_mib: int, num_gpus: int = 1) -> int:
    """Return how many tokens fit into the memory that the weights leave, as vLLM shares it out.

    Args:
        num_gpus: Number of GPUs that share weights and KV evenly.

    Raises:
        UserError: The weights leave no memory.
    """
    weights = shape.num_layers * shape.layer_weights + shape.fixed_weights
    free = num_gpus * (_MEMORY_FRACTION * memory_mib * 2**20 - _OTHER_BYTES)
    free -= weights * shape.element_bytes
    tokens = int(free / (shape.num_layers * shape.layer_token_bytes))
    if tokens < 1:
        raise UserError(f"the weights leave no KV cache in {memory_mib:,} MiB")
    return tokens


def _compared(
    given: argparse.Namespace,
    replay: RunReplay,
    profile: Profile,
    experts: tuple[int, int] | None,
) -> dict[str, tuple[GpuStepTimes, float]]:
    """Return kinds of step times by name, each with the CPU's time between two steps."""
    layers, graphs = profile.model.num_layers, graph_sizes(given.graph_tokens)
    operators: GpuStepTimes = read_operators(given.operators, layers, experts, graphs)
    package = None
    if given.system is not None:
        package = AiconfiguratorTimes(given.model, given.system, given.tensor_parallel)
        if given.tensor_parallel > 1:
            operators = WithAllReduces(operators, package)
    host_s = replay.fit(operators)
    recorded = RecordedTimes(operators)
    replay.simulated(recorded, host_s)
    prefill, decode = linear_fit(recorded.steps)
    linear = LinearTimes(replace(profile, prefill=prefill, decode_small=decode, decode_large=None))
    kinds: dict[str, tuple[GpuStepTimes, float]] = {
        "operators": (operators, 0.0),
        "operators_fitted": (operators, host_s),
        "linear_fitted": (linear, replay.fit(linear)),
    }
    if package is not None:
        kinds["package"] = (package, 0.0)
        kinds["package_fitted"] = (package, replay.fit(package))
    return kinds


def read_run(path: Path) -> list[RealRequest]:
    """Return the requests of a real run, in the order of their arrivals.

    Arrivals are of the clients' clock, tokens of the engine's. The shortest time from arrival to
    the engine's queue is taken to be 0, which sets the difference of the clocks.

    Raises:
        UserError: The file has a bad line or no request.
    """
    try:
        rows = [
            (RealRequest.of(record), float(record["queued_ts"])) for _, record in read_records(path)
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: a request lacks a value: {error}") from error
    if not rows:
        raise UserError(f"{path} holds no request")
    apart_s = min(queued_s - one.arrival_s for one, queued_s in rows)
    began_s = min(one.arrival_s for one, _ in rows)
    found = [
        one._replace(
            arrival_s=one.arrival_s - began_s,
            first_s=one.first_s - apart_s - began_s,
            last_s=one.last_s - apart_s - began_s,
        )
        for one, _ in rows
    ]
    return sorted(found, key=lambda one: one.arrival_s)


def _latencies(
    arrivals: Sequence[float],
    firsts: Sequence[float],
    lasts: Sequence[float],
    outputs: Sequence[int],
) -> Latencies:
    arrival, first, last = (np.array(one) for one in (arrivals, firsts, lasts))
    gaps = np.maximum(1, np.array(outputs) - 1)
    return {"ttft": first - arrival, "tpot": (last - first) / gaps, "latency": last - arrival}


def errors(simulated: Latencies, real: Latencies, which: NDArray[np.bool_]) -> dict[str, float]:
    """Return relative errors of mean, p90 and p99 over the requests ``which``, signed.

    ``each``: mean of the requests' own relative errors, without their signs.
    """
    found = {}
    for name in real:
        for statistic, percent in _STATISTICS.items():
            ours, theirs = (
                np.percentile(one[name][which], percent) if percent else one[name][which].mean()
                for one in (simulated, real)
            )
            found[f"{name}_{statistic}"] = float(ours / theirs - 1)
        own = simulated[name][which] / real[name][which] - 1
        found[f"{name}_each"] = float(np.abs(own).mean())
    return found
