"""Engines in this process, stepped by hand, and guests beside them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from many_parts import as_many_as_can_be
from rig import GuestParents, Rig, steps
from store_process import start_store


@pytest.fixture(scope="session")
def let_pass() -> Callable[..., Any]:
    return steps


@pytest.fixture(scope="session")
def engine_arguments() -> Callable[..., dict[str, Any]]:
    """``engine_arguments(model, migration={}, **more)``: float32, eager, greedy, chunks of 256."""

    def make(
        model: str, migration: Mapping[str, Any] = MappingProxyType({}), **more: Any
    ) -> dict[str, Any]:
        return {
            "model": model,
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 2048,
            "max_num_batched_tokens": 256,
            "kv_cache_memory_bytes": 512 << 20,
            "worker_extension_cls": "banaserve.engine.vllm.worker.WorkerExtension",
            "scheduler_cls": "banaserve.engine.vllm.migration.host.recovery.AsyncPoolScheduler",
            "async_scheduling": True,
            "disable_log_stats": True,
            "additional_config": {
                "banaserve_migration": {"poison": True, "overlap": 1, **migration}
            },
            **more,
        }

    return make


@pytest.fixture(scope="package")
def guest_parents(tmp_path_factory: pytest.TempPathFactory, _in_process: None) -> Iterator[Any]:
    parents = GuestParents(tmp_path_factory.mktemp("guests"))
    yield parents
    parents.close()


@pytest.fixture(scope="package")
def one_rig(guest_parents: Any) -> Callable[..., contextlib.AbstractContextManager[Any]]:
    """``with one_rig(arguments) as rig``: its engine and the parent of its guests."""

    @contextlib.contextmanager
    def start(arguments: dict[str, Any]) -> Iterator[Any]:
        with guest_parents.many_controls([arguments]) as (controls, folder):
            rig = Rig(arguments, controls[0], folder)
            try:
                yield rig
            finally:
                rig.close()

    return start


@pytest.fixture(scope="package")
def many_rigs(guest_parents: Any) -> Callable[..., Iterator[Any]]:
    """Engines one after another, with all parents of guests started at once."""

    def start(every: list[dict[str, Any]]) -> Iterator[Any]:
        with guest_parents.many_controls(every) as (controls, folder):
            for number, (arguments, control) in enumerate(zip(every, controls, strict=True)):
                own = folder / str(number)
                own.mkdir()
                rig = Rig(arguments, control, own)
                try:
                    yield rig
                finally:
                    rig.close()

    return start


@pytest.fixture(scope="module")
def as_many_parts_as_can_be() -> Iterator[None]:
    """Every step has as many parts as it may, cut anywhere."""
    from banaserve.engine.vllm.migration.microbatch import overlap

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap, "plan_microbatches", as_many_as_can_be)
        patch.setattr(overlap, "SMALL_TOKENS", 0)
        yield


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Six random layers with three KV heads: where many runs matter more than a real model."""
    return random_llama(tmp_path_factory.mktemp("tiny-llama"), head_size=32)


@pytest.fixture(scope="session")
def llama_of_large_heads(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same with heads of a size for which there are kernels, so that every unit can move."""
    return random_llama(tmp_path_factory.mktemp("llama-64"), head_size=64)


def random_llama(folder: Path, head_size: int) -> str:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(3)
    config = LlamaConfig(
        hidden_size=192,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=head_size,
        intermediate_size=384,
        vocab_size=2048,
        max_position_embeddings=1024,
        initializer_range=0.08,
    )
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Socket of a store of half a GiB."""
    path = tmp_path_factory.mktemp("store") / "s"
    process = start_store(path, 512 << 20)
    yield path
    process.kill()
    process.wait()


@pytest.fixture(autouse=True, scope="session")
def _in_process() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("OMP_NUM_THREADS", "1")
        yield
