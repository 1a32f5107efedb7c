"""Engines that the tests of migration share, each by a name; one runs at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from banaserve.base import models
from fork_server import ForkServer
from recorded_graphs import SIZES as GRAPH_SIZES
from recorded_graphs import recorded_graphs
from reference import reference_tokens
from rig import GuestParents, Rig
from store_process import start_store
from types_that_run import first_that_runs

SIZES = {
    "hidden_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "vocab_size": 2048,
    "max_position_embeddings": 1024,
}
GROUPED = {"num_key_value_heads": 2, "intermediate_size": 256, "initializer_range": 0.08}
# Three KV heads of a size for which there are kernels, so that every kind of unit can move.
LLAMA = {
    "hidden_size": 192,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "intermediate_size": 384,
    "initializer_range": 0.08,
}
# Latents of the one size that ``CPU_MLA`` decodes.
LATENT = {
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "intermediate_size": 256,
    "initializer_range": 0.08,
    "moe_intermediate_size": 64,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
}
STORE_BYTES = 512 << 20
# Guests that are to be given up are started with less patience.
MIGRATION = {"poison": True, "overlap": 1, "stall_s": 10.0}


def random_model(family: str, **sizes: Any) -> Callable[[Path], str]:
    """``make(folder)``: a model of random weights, float32, the same for the same arguments."""

    def make(folder: Path) -> str:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(3)
        config = AutoConfig.for_model(family, **{**SIZES, **sizes})
        AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
        return str(folder)

    return make


def smollm2(folder: Path) -> str:
    return models.resolve(models.PACKAGED, None, print).path_or_id


@dataclass(frozen=True)
class EngineKind:
    """An engine's model and options, beside those that all have.

    Attributes:
        model: Makes it in a folder; returns its path.
        migration: Settings of migration.
        options: Of vLLM.
        has_store: Whether it saves to and loads from a store of its own.
        is_compiled: Whether its model is.
        has_graphs: True if small steps of the engine run as recorded CUDA graphs.
    """

    model: Callable[[Path], str]
    migration: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    has_store: bool = False
    is_compiled: bool = False
    has_graphs: bool = False


RANDOM = {
    "skip_tokenizer_init": True,
    "max_model_len": 1024,
    "kv_cache_memory_bytes": 64 << 20,
}
_llama = random_model("llama", **LLAMA)
_mixtral = random_model("mixtral", **LLAMA, num_local_experts=4, sliding_window=None)
_qwen2 = random_model("qwen2", **{**GROUPED, "hidden_size": 256})
_OF_KERNELS = {**RANDOM, "kv_cache_memory_bytes": 96 << 20, "block_size": 32}
_SYNC = {
    "async_scheduling": False,
    "scheduler_cls": "banaserve.migration.host.recovery.PoolScheduler",
}

ENGINES = {
    "llama": EngineKind(_llama, options=RANDOM),
    "llama, bfloat16": EngineKind(_llama, options={**RANDOM, "dtype": "bfloat16"}),
    "mixtral, compiled": EngineKind(_mixtral, options=RANDOM, is_compiled=True),
    "mixtral, graphs": EngineKind(_mixtral, options=RANDOM, has_graphs=True),
    "llama, synchronous": EngineKind(_llama, options={**RANDOM, **_SYNC}),
    # So few blocks that long prompts preempt each other.
    "llama, store": EngineKind(
        _llama, options={**RANDOM, "block_size": 32, "num_gpu_blocks_override": 38}, has_store=True
    ),
    "llama, pool": EngineKind(
        random_model("llama", **{**LLAMA, "num_hidden_layers": 12}),
        {"poison": False, "kv_growth": 2.1},
        {**RANDOM, "num_gpu_blocks_override": 21},
    ),
    "opt": EngineKind(
        random_model("opt", ffn_dim=256, word_embed_proj_dim=128, init_std=0.08), options=RANDOM
    ),
    "mixtral": EngineKind(_mixtral, options=RANDOM),
    "deepseek_v2": EngineKind(
        random_model("deepseek_v2", **LATENT),
        options={
            **RANDOM,
            # As a server has it: see ``rotate_latents_in_torch``.
            "compilation_config": {"custom_ops": ["-rotary_embedding"]},
            # Sums of experts are compared in float32, which no other kernel of vLLM's for latents
            # computes on every processor.
            "attention_backend": "CPU_MLA",
        },
    ),
    "qwen2": EngineKind(random_model("qwen2", **GROUPED), options=RANDOM),
    "mistral": EngineKind(
        random_model("mistral", **GROUPED, sliding_window=None, head_dim=32), options=RANDOM
    ),
    "qwen2, vllm": EngineKind(_qwen2, {"attention": "vllm"}, _OF_KERNELS),
    "qwen2, kernels": EngineKind(_qwen2, {"attention": "kernels"}, _OF_KERNELS),
    "smollm2, vllm": EngineKind(smollm2, {"attention": "vllm"}, _OF_KERNELS),
    "smollm2, kernels": EngineKind(smollm2, {"attention": "kernels"}, _OF_KERNELS),
    "smollm2": EngineKind(smollm2, options={"kv_cache_memory_bytes": 256 << 20}),
}
"""In the order in which tests run, see ``pytest_collection_modifyitems``."""


@contextlib.contextmanager
def _compiling(is_wanted: bool) -> Iterator[None]:
    """Let the model of an engine that starts be compiled, and nothing after it: as servers do."""
    import torch

    if is_wanted:
        torch.compiler.set_stance("default")
    try:
        yield
    finally:
        torch.compiler.set_stance("force_eager")


class Engines:
    """The engine that a file asks for, which goes on until another is asked for.

    Args:
        parents: Of guests.
        forks: Returns what starts the plain engine that is asked where one of these does not start.
        folder: For models and the socket of the store.
    """

    def __init__(
        self, parents: GuestParents, forks: Callable[[], ForkServer], folder: Path
    ) -> None:
        self._parents = parents
        self._forks = forks
        self._folder = folder
        self._models: dict[Callable[[Path], str], str] = {}
        self._name = ""
        self._stack = contextlib.ExitStack()
        self._rig: Rig | None = None

    def take(self, name: str) -> Rig:
        """The engine of that name, with everything at home."""
        if name != self._name or self._rig is None:
            self.close()
            with contextlib.ExitStack() as stack:
                self._rig = self._start(ENGINES[name], stack)
                self._stack = stack.pop_all()
            self._name = name
        return self._rig

    def _start(self, kind: EngineKind, stack: contextlib.ExitStack) -> Rig:
        arguments = {
            "model": self._model(kind.model),
            "dtype": "float32",
            "enforce_eager": not kind.is_compiled,
            "max_model_len": 2048,
            "max_num_batched_tokens": 256,
            "worker_extension_cls": "banaserve.mains.worker.WorkerExtension",
            "scheduler_cls": "banaserve.migration.host.recovery.AsyncPoolScheduler",
            "async_scheduling": True,
            "disable_log_stats": True,
            "additional_config": {"banaserve_migration": {**MIGRATION, **kind.migration}},
            **kind.options,
        }
        store = None
        if kind.has_store:
            store = self._folder / "s"
            process = start_store(store, STORE_BYTES)
            stack.callback(process.wait)
            stack.callback(process.kill)
            arguments["kv_transfer_config"] = {
                "kv_connector": "StoreConnector",
                "kv_connector_module_path": "banaserve.engine.connector.connector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"socket": str(store), "cost_gate": False},
            }
        if kind.has_graphs:
            stack.enter_context(recorded_graphs())
        control, folder = stack.enter_context(self._parents.parent(arguments))
        with _compiling(kind.is_compiled), self._skipping(arguments["model"], kind):
            rig = Rig(arguments, control, folder, store)
        stack.callback(rig.close)
        if kind.has_graphs:
            rig.capture(GRAPH_SIZES)
        return rig

    @contextlib.contextmanager
    def _skipping(self, model: str, kind: EngineKind) -> Iterator[None]:
        """Skip the test if what fails inside fails in a plain engine of the same type too."""
        try:
            yield
        except Exception:
            ours = ("scheduler_cls", "async_scheduling")
            options = {name: one for name, one in kind.options.items() if name not in ours}

            def run(dtype: str) -> object:
                asked = {**options, "dtype": dtype}
                return reference_tokens(
                    self._forks(), model, [[5, 6, 7]], {"it": {"max_tokens": 2}}, options=asked
                )

            first_that_runs(model, run, (kind.options.get("dtype", "float32"),))
            raise

    def _model(self, make: Callable[[Path], str]) -> str:
        if make not in self._models:
            folder = self._folder / f"model-{len(self._models)}"
            folder.mkdir()
            self._models[make] = make(folder)
        return self._models[make]

    def close(self) -> None:
        """End the engine that runs, if one does."""
        self._name, self._rig = "", None
        self._stack.close()
