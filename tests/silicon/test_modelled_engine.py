"""Engines that are derived from a config.json and a GPU, and the errors that are stated of them."""

from __future__ import annotations

import json
import shutil
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from banaserve.base.errors import UserError
from banaserve_bench.results import result
from banaserve_bench.silicon.modelled_engine import (
    KNOWN_ERRORS,
    device_names,
    model_folder,
    modelled_engine,
)
from benchmarks.known_errors import RESULT, text

_LLAMA = "meta-llama/Meta-Llama-3.1-8B"
_HAS_PACKAGE = find_spec("aiconfigurator_core") is not None
pytestmark = pytest.mark.deep
needs_package = pytest.mark.skipif(not _HAS_PACKAGE, reason="the package is not there")


def test_stated_errors_are_those_that_were_measured() -> None:
    record = result.read(RESULT)
    assert text(record.raw["groups"]) == KNOWN_ERRORS.read_text()
    stated = tomllib.loads(KNOWN_ERRORS.read_text())
    summed = record.figures["all, summed TPOT"]
    numbers = [stated[kind]["num_runs"] for kind in ("block_scales", "others")]
    means = [stated[kind]["tpot"] for kind in ("block_scales", "others")]
    assert sum(numbers) == len(summed.samples)
    weighted = sum(n * mean for n, mean in zip(numbers, means, strict=True)) / sum(numbers)
    assert weighted == pytest.approx(sum(summed.samples) / len(summed.samples), abs=1e-3)


@needs_package
def test_the_profile_has_the_models_dimensions_and_the_memory_that_is_left() -> None:
    engine = modelled_engine(_LLAMA, "h100_sxm")
    model = engine.profile.model
    assert (model.num_layers, model.num_kv_heads, model.max_context_tokens) == (32, 8, 131_072)
    assert model.token_bytes == 2 * 32 * 8 * 128 * 2
    # 0.9 of 80 GiB less 15 GiB of weights and a few GiB for activations and the runtime.
    left = engine.profile.memory.kv_tokens * model.token_bytes
    assert 0.9 * 80 * 2**30 - engine.weight_bytes - 6 * 2**30 < left < 60 * 2**30
    assert engine.measured.error.tpot == tomllib.loads(KNOWN_ERRORS.read_text())["others"]["tpot"]
    # The linear times with which policies forecast are near those that are simulated.
    step_s = engine.measured.times.step_s(2048, 2048**2, 0, 0)
    prefill = engine.profile.prefill
    linear_s = prefill.fixed_s + 2048 * prefill.token_s + 2048**2 * prefill.pair_s
    assert linear_s == pytest.approx(step_s, rel=0.2)


@needs_package
def test_more_gpus_are_faster_and_have_more_room() -> None:
    one, four = (modelled_engine(_LLAMA, "h100_sxm", size) for size in (1, 4))
    assert four.measured.times.step_s(0, 0, 8, 8000) < one.measured.times.step_s(0, 0, 8, 8000)
    assert four.profile.memory.kv_tokens > 4 * one.profile.memory.kv_tokens
    # Each GPU sends its own share of the heads.
    assert four.profile.model.token_bytes == one.profile.model.token_bytes / 4
    slow = modelled_engine(_LLAMA, "h100_sxm", 1, 5e9).profile
    assert slow.link.bytes_per_s == 5e9 < one.profile.link.bytes_per_s


@needs_package
def test_constants_that_were_fitted_on_the_same_model_and_gpu_are_used() -> None:
    fitted = modelled_engine("Qwen/Qwen3-32B", "h100_sxm", 2).measured
    assert fitted.constants.host_s > 1e-3
    assert fitted.error.tpot < 0.05
    assert fitted.way_s > 0
    assert modelled_engine("Qwen/Qwen3-32B", "h200_sxm", 2).measured.constants.host_s == 0


@needs_package
def test_latent_attention_and_block_scales() -> None:
    engine = modelled_engine("deepseek-ai/DeepSeek-V3", "h200_sxm", 8)
    # 512 latent and 64 rotary elements of a layer, on every GPU.
    assert engine.profile.model.layer_token_bytes == 576
    assert engine.measured.error.tpot > 0.5


@needs_package
def test_a_file_a_folder_and_a_name_are_the_same_model(tmp_path: Path) -> None:
    package = find_spec("aiconfigurator_core")
    assert package is not None
    configs = Path(str(package.origin)).with_name("model_configs")
    path = tmp_path / "config.json"
    shutil.copyfile(configs / f"{_LLAMA.replace('/', '--')}_config.json", path)
    assert model_folder(str(path)) == model_folder(str(tmp_path)) == str(tmp_path)
    own, known = (modelled_engine(one, "h100_sxm").profile for one in (str(path), _LLAMA))
    assert own.model == known.model
    assert own.memory == known.memory


@needs_package
@pytest.mark.parametrize(
    ("model", "device", "size", "words"),
    [
        (_LLAMA, "h100", 1, "did you mean h100_sxm"),
        ("meta-llama/Llama-3.1-8B", "h100_sxm", 1, "such as meta-llama/Meta-Llama-3.1-8B"),
        ("none/config.json", "h100_sxm", 1, "give an existing file that is named config.json"),
        ("meta-llama/Meta-Llama-3.1-70B", "h100_sxm", 1, "give a larger --tensor-parallel"),
        ("SHAPE", "h100_sxm", 1, "is not supported"),
    ],
)
def test_what_cannot_be_known_is_one_line(
    tmp_path: Path, model: str, device: str, size: int, words: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Strange"]}))
    with pytest.raises(UserError) as failure:
        modelled_engine(str(tmp_path) if model == "SHAPE" else model, device, size)
    assert words in str(failure.value)
    assert len(str(failure.value)) < 400
    assert "\n" not in str(failure.value)


@needs_package
@pytest.mark.room
def test_every_listed_device_has_operators() -> None:
    for device in device_names():
        assert modelled_engine(_LLAMA, device, 4).profile.memory.kv_tokens > 0


@pytest.mark.skipif(_HAS_PACKAGE, reason="the package is there")
def test_without_the_package_a_device_needs_it() -> None:
    with pytest.raises(UserError, match=r"pip install 'banaserve-bench\[plan\]'"):
        device_names()
