"""Engines that cannot migrate say why before anything moves."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from banaserve.base.errors import MigrationError, UserError


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of a tiny Llama that can migrate."""
    from transformers import LlamaConfig
    from vllm.engine.arg_utils import EngineArgs

    folder = tmp_path_factory.mktemp("llama")
    LlamaConfig(
        hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256
    ).save_pretrained(folder)
    _name_architecture(folder)
    arguments = EngineArgs(
        model=str(folder), dtype="float32", enforce_eager=True, skip_tokenizer_init=True
    )
    return arguments.create_engine_config()


def _name_architecture(folder: Path) -> None:
    path = folder / "config.json"
    text = path.read_text().rstrip().removesuffix("}")
    path.write_text(f'{text}, "architectures": ["LlamaForCausalLM"]}}')


def _compiled(config: Any) -> None:
    from vllm.config import CompilationMode

    config.compilation_config.mode = CompilationMode.VLLM_COMPILE


def _compiled_elsewhere(config: Any) -> None:
    from torch import device

    _compiled(config)
    config.device_config.device = device("cuda")
    config.device_config.device_type = "cuda"


def _compiled_by_torch(config: Any) -> None:
    from vllm.config import CompilationMode

    config.compilation_config.mode = CompilationMode.STOCK_TORCH_COMPILE


def _speculative(config: Any) -> None:
    config.speculative_config = object()


def _stages(config: Any) -> None:
    config.parallel_config.pipeline_parallel_size = 2


def _replicas(config: Any) -> None:
    config.parallel_config.data_parallel_size = 2


def _ranks(config: Any) -> None:
    config.parallel_config.tensor_parallel_size = 2


def _adapters(config: Any) -> None:
    config.lora_config = object()


def _gguf(config: Any) -> None:
    config.model_config.quantization = "gguf"


def _sharded(config: Any) -> None:
    config.load_config.load_format = "sharded_state"


@pytest.mark.parametrize("change", [None, _compiled, _ranks])
def test_engines_that_can(config: Any, change: Callable[[Any], None] | None) -> None:
    from banaserve.migration.checks import check_config

    changed = copy.deepcopy(config)
    if change is not None:
        change(changed)
    check_config(changed)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_compiled_elsewhere, "--enforce-eager"),
        (_compiled_by_torch, "--enforce-eager"),
        (_speculative, "speculative"),
        (_stages, "pipeline parallel"),
        (_replicas, "data parallel"),
        (_adapters, "LoRA"),
        (_gguf, "gguf"),
        (_sharded, "sharded_state"),
    ],
)
def test_others_say_why_not(config: Any, change: Callable[[Any], None], why: str) -> None:
    from banaserve.migration.checks import check_config

    changed = copy.deepcopy(config)
    change(changed)
    with pytest.raises(MigrationError, match=why):
        check_config(changed)


def test_mixed_and_windowed_attention_are_refused() -> None:
    import torch
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheGroupSpec,
        MLAAttentionSpec,
        SlidingWindowSpec,
    )

    from banaserve.migration.checks import check_groups

    shape = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}
    full = KVCacheGroupSpec(["a"], FullAttentionSpec(**shape))
    windowed = KVCacheGroupSpec(["b"], SlidingWindowSpec(**shape, sliding_window=64))
    latent = KVCacheGroupSpec(["c"], MLAAttentionSpec(**{**shape, "num_kv_heads": 1}))
    check_groups([full])
    check_groups([latent])
    for groups, why in (([full, windowed], "mixes"), ([windowed], "SlidingWindowSpec")):
        with pytest.raises(MigrationError, match=why):
            check_groups(groups)


def test_layers_that_do_not_lie_in_one_list_are_refused() -> None:
    from torch import nn

    from banaserve.migration.checks import find_layers

    class Layer(nn.Module):
        def forward(self, hidden_states: Any) -> Any:
            return hidden_states

    class Other(nn.Module):
        def forward(self, x: Any) -> Any:
            return x

    model = nn.Module()
    model.blocks = nn.ModuleList([Layer(), Layer()])
    model.others = nn.ModuleList([Other()])
    assert find_layers(model, {0: "blocks.0.attn", 1: "blocks.1.attn"}) == ("blocks", model.blocks)
    for names, why in (
        ({0: "blocks.0.attn"}, "one list"),
        ({0: "blocks.0.attn", 1: "elsewhere.1.attn"}, "one list"),
        ({0: "nowhere.0.attn"}, "one list"),
        ({0: "others.0.attn"}, "hidden_states"),
    ):
        with pytest.raises(MigrationError, match=why):
            find_layers(model, names)


@pytest.mark.parametrize(
    "given", [{"kv_grow": 2}, {"kv_growth": 0.5}, {"stall_s": 0}, {"poison": "yes"}]
)
def test_settings_are_checked(config: Any, given: dict[str, Any]) -> None:
    from banaserve.engine.migration_settings import KEY, settings_of

    changed = copy.deepcopy(config)
    assert settings_of(changed) is None
    changed.additional_config = {KEY: given}
    with pytest.raises(UserError, match=KEY):
        settings_of(changed)
