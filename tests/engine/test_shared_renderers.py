"""What all clients of a server's engines have in common, and what all its engines have."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine import EngineCoreReadyResponse, async_llm
from vllm.v1.worker import block_table

import small_model
from banaserve.engine.compat.config import VllmConfig
from banaserve.engine.compat.engine import override_kernels
from banaserve.engine.compat.front.clients import lent_renderer
from banaserve.engine.engine_args import engine_config, parse_vllm_argv

KERNEL = block_table.ComputeSlotMappingKernel


def config_of(path: str, *options: str) -> VllmConfig:
    return engine_config(parse_vllm_argv(["--model", path, "--enforce-eager", *options]))


@pytest.fixture(scope="module")
def config() -> VllmConfig:
    return config_of(small_model.resolve().path_or_id)


@pytest.fixture
def lent(config: VllmConfig) -> Iterator[object]:
    made = lent_renderer(config)
    yield made
    made.shutdown()


def test_engines_answers_are_described_before_clients_connect_on_threads() -> None:
    # Of two threads that describe a type to msgspec at once, one crashes with the other's half.
    assert "__msgspec_cache__" in vars(EngineCoreReadyResponse)


def test_clients_have_the_front_doors_renderer(config: VllmConfig, lent: object) -> None:
    assert async_llm.renderer_from_config(copy.deepcopy(config)) is lent


def test_the_last_front_door_lends_its_own(config: VllmConfig, lent: object) -> None:
    other = lent_renderer(copy.deepcopy(config))
    assert other is not lent
    assert async_llm.renderer_from_config(config) is other
    other.shutdown()


def test_a_client_of_another_tokenizer_has_its_own(lent: object, tmp_path: Path) -> None:
    shutil.copytree(small_model.resolve().path_or_id, tmp_path, dirs_exist_ok=True)
    made = async_llm.renderer_from_config(config_of(str(tmp_path)))
    assert made is not lent
    made.shutdown()


def test_no_renderer_takes_the_token_for_prompt_embeddings_for_one_of_the_model() -> None:
    config = config_of(small_model.resolve().path_or_id, "--enable-prompt-embeds")
    size = config.model_config.get_vocab_size()
    for _ in range(2):
        made = lent_renderer(config)
        made.validate_token_ids([size - 1])
        with pytest.raises(VLLMValidationError, match="out of vocabulary"):
            made.validate_token_ids([size])
        made.shutdown()


def test_kernels_are_put_in_place_once() -> None:
    override_kernels()
    kernel = KERNEL.kernel
    override_kernels()
    assert KERNEL.kernel is kernel
