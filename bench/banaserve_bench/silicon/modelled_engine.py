"""Engine of any model on a GPU that aiconfigurator-core knows: its profile and its step times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from banaserve.base.errors import UserError
from banaserve.base.models import find_local
from banaserve.base.text.names import check_known
from banaserve.orchestrator.control.costs.profile import (
    MemorySection,
    ModelSection,
    Profile,
    read_toml,
)
from banaserve.orchestrator.control.model.moving import Link
from banaserve_bench.silicon.aiconfigurator import (
    MOST_CHARS,
    PACKAGE_MISSING,
    AiconfiguratorTimes,
)
from banaserve_bench.silicon.costs import EngineConstants
from banaserve_bench.silicon.description import ErrorSection, StepTimesDescription
from banaserve_bench.silicon.linear import linear_fit
from banaserve_bench.silicon.step_times import GpuStepTimes

STEP_TOKENS = 8192
"""Largest step of the runs that the errors are of, for which an engine keeps room."""
_REQUESTS = 256
_MEMORY_FRACTION = 0.9
"""vLLM's default of ``--gpu-memory-utilization``."""
_SYNC_S, _HOP_S = 5e-3, 20e-6
"""As in the built-in profiles: only moves of modules depend on them."""
_PACKAGE = "aiconfigurator_core"
KNOWN_ERRORS = Path(__file__).with_name("whole_runs.toml")
_NEAREST = 3


class ModelledEngine(NamedTuple):
    """Profile and step times of one engine.

    Attributes:
        weight_bytes: Size of the weights on each GPU.
    """

    profile: Profile
    measured: StepTimesDescription
    weight_bytes: int


def device_names() -> list[str]:
    """Return the names of GPUs that the package has operators of, under vLLM.

    Raises:
        UserError: The package is not installed.
    """
    return sorted(
        path.stem
        for path in package_systems().glob("*.yaml")
        if any((package_systems() / "data" / path.stem).glob("attention/vllm"))
    )


def modelled_engine(
    model: str, device: str, tensor_parallel: int = 1, link_bytes_per_s: float | None = None
) -> ModelledEngine:
    """Return the engine of a model on ``tensor_parallel`` GPUs of one kind; nothing is fetched.

    Args:
        model: Folder with a config.json, that file, or a name that the package or this machine has.
        link_bytes_per_s: Bandwidth of a GPU's share of the network; None for what the package
            states of ``device``.

    Raises:
        UserError: Model or device is unknown, the package has no operators for it, or the weights
            leave no room for KV.
    """
    check_known("device", device, device_names())
    folder = model_folder(model)
    times = AiconfiguratorTimes(folder, device, tensor_parallel)
    try:
        shape = _shape(folder)
        memory = _memory(folder, device, tensor_parallel)
    except Exception as error:
        # The package raises ValueError, KeyError and others; all are about model and device.
        told = " ".join(str(error).split())[:MOST_CHARS]
        hint = "" if "KV budget" not in told else ": give a larger --tensor-parallel"
        raise UserError(f"{model} on {tensor_parallel} x {device}: {told}{hint}") from error
    name = f"{Path(folder).name}-{device}-tp{tensor_parallel}"
    profile = _profile(name, shape, memory, times, _link(device, link_bytes_per_s))
    return ModelledEngine(
        profile,
        _described(name, folder, device, shape.has_block_scales, times),
        memory.weight_bytes,
    )


def model_folder(model: str) -> str:
    """Return what the package reads a model's config.json by: a folder, or one of its names.

    Raises:
        UserError: The model is neither here nor among the package's.
    """
    path = Path(model)
    if path.name == "config.json" and path.is_file():
        return str(path.parent)
    if path.suffix == ".json":
        raise UserError(f"{model}: give an existing file that is named config.json, or its folder")
    if (path / "config.json").is_file():
        return model
    known = {one.stem.removesuffix("_config").replace("--", "/", 1) for one in _configs()}
    if model in known:
        return model
    if (local := find_local(model)) is not None:
        return str(local)
    near = ", ".join(get_close_matches(model, known, n=_NEAREST, cutoff=0.0))
    raise UserError(
        f"no config.json of {model}: give a folder that has one, or a known name such as {near}"
    )


def config_file(model: str) -> Path:
    """Return the config.json of a model, as ``model_folder`` finds it.

    Raises:
        UserError: The model is neither here nor among the package's.
    """
    folder = model_folder(model)
    of_package = {one.name: one for one in _configs()}
    known = of_package.get(f"{folder.replace('/', '--')}_config.json")
    return known or Path(folder) / "config.json"


class _Shape(NamedTuple):
    """Dimensions that a config.json states."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    max_context_tokens: int
    has_block_scales: bool


class _Memory(NamedTuple):
    """Memory of one GPU of the engine."""

    kv_tokens: int
    token_bytes: int
    weight_bytes: int


def _shape(folder: str) -> _Shape:
    from aiconfigurator_core.sdk.utils import get_model_config_from_model_path

    found: Mapping[str, Any] = get_model_config_from_model_path(folder)
    raw = found.get("raw_config") or {}
    scales = (raw.get("quantization_config") or {}).get("weight_block_size")
    heads = int(found["n"])
    return _Shape(
        int(found["layers"]),
        int(found["hidden_size"]),
        heads,
        int(found["n_kv"]) or heads,
        int(found["context"]),
        bool(scales),
    )


def _memory(folder: str, device: str, tensor_parallel: int) -> _Memory:
    from aiconfigurator_core.sdk.memory import estimate_kv_cache

    found = estimate_kv_cache(
        folder,
        device,
        "vllm",
        "current",
        max_num_tokens=STEP_TOKENS,
        max_batch_size=_REQUESTS,
        memory_fraction_kind="of_total",
        memory_fraction_value=_MEMORY_FRACTION,
        tp_size=tensor_parallel,
        moe_tp_size=tensor_parallel,
        moe_ep_size=1,
    )
    return _Memory(
        int(found["total_kv_size_tokens"]),
        int(found["kv_size_per_token_bytes"]),
        int(found["memory_breakdown"]["weights_bytes"]),
    )


def _profile(name: str, shape: _Shape, memory: _Memory, times: GpuStepTimes, link: Link) -> Profile:
    prefill, decode = linear_fit({step: times.step_s(*step) for step in _steps()})
    # All weights count as the layers', whose split only moves of modules look at.
    layer_weights = max(1, memory.weight_bytes // (2 * shape.num_layers))
    heads = shape.num_kv_heads if shape.num_heads % shape.num_kv_heads == 0 else shape.num_heads
    return Profile(
        name,
        "derived from config.json, and from operators and devices of aiconfigurator-core",
        ModelSection(
            num_layers=shape.num_layers,
            hidden_size=shape.hidden_size,
            num_heads=shape.num_heads,
            num_kv_heads=heads,
            layer_weights=layer_weights,
            fixed_weights=1,
            max_context_tokens=shape.max_context_tokens,
            layer_kv_bytes=max(1, round(memory.token_bytes / shape.num_layers)),
        ),
        prefill,
        decode,
        None,
        MemorySection(memory.kv_tokens),
        link,
    )


def _steps() -> list[tuple[int, int, int, int]]:
    """Return the steps that a profile's linear times are fitted to."""
    prompts = [(tokens, tokens * tokens, 0, 0) for tokens in (128, 512, 2048, STEP_TOKENS)]
    after = [(512, 512 * (512 + 2 * computed), 0, 0) for computed in (2048, 8192)]
    decode = [(0, 0, n, n * each) for n, each in product((1, 8, 64, 256), (128, 1024, 4096))]
    return [*prompts, *after, *decode]


def _link(device: str, bytes_per_s: float | None) -> Link:
    """Return the path of KV from one engine to another, by host memory, for each GPU."""
    if bytes_per_s is None:
        import yaml

        node = yaml.safe_load((package_systems() / f"{device}.yaml").read_text())["node"]
        bytes_per_s = float(min(node["inter_node_bw"], node["pcie_bw"]))
    return Link(bytes_per_s, _SYNC_S, _HOP_S)


def _described(
    name: str, folder: str, device: str, has_block_scales: bool, times: GpuStepTimes
) -> StepTimesDescription:
    known = read_toml(KNOWN_ERRORS)
    of_both = [one for one in known["fitted"] if (one["model"], one["device"]) == (folder, device)]
    # The last version of vLLM; runs that name none come first.
    fitted = max(of_both, key=lambda one: _numbers(one["version"]), default=None)
    # GEMMs of checkpoints in fp8 with a scale for each block were measured slower than vLLM's.
    summed = known["block_scales" if has_block_scales else "others"]
    error = summed if fitted is None else fitted
    if fitted is None:
        source = "sums of operators in aiconfigurator-core, nothing fitted"
        judged = f"other models and devices too: {summed['runs']}"
    else:
        version = fitted["version"] or "an unnamed version"
        source = f"sums of operators in aiconfigurator-core, fitted on runs of vLLM {version}"
        judged = "this model and device"
    return StepTimesDescription(
        name,
        source,
        f"steps of up to {STEP_TOKENS:,} tokens, under vLLM 0.24 or the nearest version measured; "
        "runs had 4 to 512 clients, prompts of 1,000 to 8,192 tokens, answers of 100 to 8,192",
        f"{error['num_runs']} runs of {judged} (means; silicon-runs.json)",
        ErrorSection(error["ttft"], error["tpot"], error["latency"]),
        EngineConstants() if fitted is None else _constants(fitted),
        times,
        *((0.0, 0.0) if fitted is None else (fitted["way_s"], fitted["way_token_s"])),
    )


def _constants(fitted: Mapping[str, Any]) -> EngineConstants:
    return EngineConstants(**{one.name: fitted[one.name] for one in fields(EngineConstants)})


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdecimal()]


def package_systems() -> Path:
    """Return the package's folder of GPUs; raise UserError if the package is not installed."""
    package = find_spec(_PACKAGE)
    if package is None or package.origin is None:
        raise UserError(PACKAGE_MISSING)
    return Path(package.origin).with_name("systems")


def _configs() -> list[Path]:
    return list(package_systems().with_name("model_configs").glob("*_config.json"))
