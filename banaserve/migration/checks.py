"""Checks that an engine can take part in live migration, before anything moves."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from banaserve.base.errors import MigrationError
from banaserve.contracts.environment import GRAPHS_VARIABLE
from banaserve.engine.compat.config import CompilationMode, CUDAGraphMode, VllmConfig
from banaserve.engine.compat.kv_cache import FullAttentionSpec
from banaserve.engine.compat.runner.graphs import are_breakable
from banaserve.engine.engine_args import PAGE_LAYOUT
from banaserve.engine.migration_settings import packs_nothing, settings_of

_PARTIAL_LOAD_FORMATS = ("auto", "hf", "safetensors", "pt", "mistral", "dummy")
_OF_ONE_HEAD = "LBNHC"
"""Equivalent layout of a cache with one head, such as latents: token before head."""
_EAGER = "--enforce-eager"
_WHOLE_MODEL_QUANTISATION = ("bitsandbytes", "gguf", "torchao")


def check_config(config: VllmConfig) -> None:
    """Refuse with the reason an engine whose configuration alone rules out migration."""
    reason = _config_blocker(config)
    if reason is not None:
        raise MigrationError(f"this engine cannot migrate: {reason}")


def _config_blocker(config: VllmConfig) -> str | None:
    model, parallel = config.model_config, config.parallel_config
    if model.is_hybrid or model.is_attention_free or model.has_inner_state:
        return "states of Mamba or linear-attention layers would have to move with their requests"
    if model.use_mla and attends_with_kernels(config):
        return "only vLLM's own attention on CPU reads MLA's latents, and its kernels would not"
    if config.speculative_config is not None:
        return "speculative decoding reads states of layers that may be elsewhere"
    kind = str(config.device_config.device_type)
    if kind not in ("cpu", "cuda"):
        return f"its KV lies on {kind}, for which there are no kernels"
    if parallel.pipeline_parallel_size > 1:
        return "a stage of a pipeline parallel engine holds some of the layers alone"
    if parallel.data_parallel_size > 1:
        return "data parallel engines step together, wherever their layers are"
    if config.lora_config is not None:
        return "LoRA adapters would have to move with their layers"
    if model.quantization in _WHOLE_MODEL_QUANTISATION:
        return f"{model.quantization} weights cannot be loaded for some layers alone"
    load_format = str(config.load_config.load_format)
    if load_format not in _PARTIAL_LOAD_FORMATS:
        return f"weights of format {load_format} cannot be loaded for some layers alone"
    return _graph_blocker(config)


def _graph_blocker(config: VllmConfig) -> str | None:
    """Return which compiled code or CUDA graphs would hold modules after they have left."""
    compilation = config.compilation_config
    is_on_cpu = str(config.device_config.device_type) == "cpu"
    calls_layers = is_on_cpu and compilation.mode != CompilationMode.STOCK_TORCH_COMPILE
    if not calls_layers and compilation.mode != CompilationMode.NONE:
        remedy = "" if is_on_cpu else f"without a compilation mode and {GRAPHS_VARIABLE}=0, or "
        return f"compiled code holds the layers that would move: start it {remedy}with {_EAGER}"
    graphs = compilation.cudagraph_mode
    if is_on_cpu or graphs == CUDAGraphMode.NONE:
        return None
    if graphs != CUDAGraphMode.PIECEWISE or not are_breakable():
        return (
            f"{graphs.name} CUDA graphs hold what would move: leave their mode and "
            f"{GRAPHS_VARIABLE} as they are by default, or start it with {_EAGER}"
        )
    return None


def attends_with_kernels(config: VllmConfig) -> bool:
    """Return whether our kernels compute attention in place of vLLM's."""
    is_on_cpu = str(config.device_config.device_type) == "cpu"
    return not is_on_cpu or packs_nothing(settings_of(config))


def plans_one_batch(attention: Any) -> bool:
    """Return whether an attention's metadata of a batch is void once that of another is built.

    FlashInfer's wrappers, which vLLM keeps, hold the plan of the last batch alone.
    """
    backend = getattr(attention, "attn_backend", None)
    return backend is not None and backend.get_name() == "FLASHINFER"


def overlap_blocker(config: VllmConfig, attentions: Iterable[Any] = ()) -> str:
    """Return the reason why steps of this engine cannot be cut; empty if they can."""
    model = config.model_config
    if any(map(plans_one_batch, attentions)):
        return "FlashInfer plans one batch of a step"
    if config.parallel_config.tensor_parallel_size > 1:
        return "its ranks say after each range whether their guests have answered"
    if model.is_encoder_decoder:
        return "an encoder's tokens look at later ones"
    if model.is_mm_prefix_lm:
        return "tokens of an image look at later ones"
    if model.use_mla:
        return "vLLM's MLA keeps what it prepares for the prompts of one part alone"
    if model.uses_mrope:
        return "its positions have several rows for each token"
    transfer = config.kv_transfer_config
    if transfer is not None and transfer.kv_connector != "StoreConnector":
        return f"{transfer.kv_connector} would save a layer before all of its tokens are there"
    return ""


def check_groups(groups: Iterable[Any]) -> None:
    """Refuse models that mix kinds of attention.

    Raises:
        MigrationError: There is not exactly one group of full attention, with keys and values or
            with latents.
    """
    specs = [group.kv_cache_spec for group in groups]
    if len(specs) != 1:
        raise MigrationError(
            "this engine cannot migrate: the model mixes kinds of attention, whose blocks have "
            "ids of their own"
        )
    if not isinstance(specs[0], FullAttentionSpec):
        raise MigrationError(
            f"this engine cannot migrate: {type(specs[0]).__name__} is not full attention"
        )


def find_layers(model: nn.Module, names: Mapping[int, str]) -> tuple[str, nn.ModuleList]:
    """Return the path of the model's list of decoder layers, and the list.

    Args:
        names: Names of the attentions by layer.

    Raises:
        MigrationError: The attentions are not in one list of layers, or these layers take no
            hidden states.
    """
    paths = {name.split(f".{layer}.")[0] for layer, name in names.items()}
    path = paths.pop() if len(paths) == 1 else ""
    try:
        layers = model.get_submodule(path) if path else None
    except AttributeError:
        layers = None
    if not isinstance(layers, nn.ModuleList) or len(layers) != len(names):
        raise MigrationError("this engine cannot migrate: its layers do not lie in one list")
    if any("hidden_states" not in inspect.signature(m.forward).parameters for m in layers):
        raise MigrationError("this engine cannot migrate: its layers take no hidden_states")
    return path, layers


def check_heads(attention: Any, name: str) -> None:
    """Refuse with the reason to split an attention whose heads differ or have no own KV."""
    if getattr(attention, "kv_lora_rank", None) is not None:
        raise MigrationError(
            f"{name} keeps one latent for all of its heads: move the whole layer instead"
        )
    impl = getattr(attention.impl, "inner", attention.impl)
    for attribute, what in (("alibi_slopes", "ALiBi"), ("sinks", "attention sinks")):
        if getattr(impl, attribute, None) is not None:
            raise MigrationError(f"{name} has {what} by head: move the whole layer instead")
    if str(attention.kv_cache_dtype).startswith("fp8"):
        raise MigrationError(f"{name} keeps scaled KV: move the whole layer instead")


def check_tensors(kv_caches: Mapping[str, Any], layout: str, num_blocks: int) -> None:
    """Refuse a KV cache whose layers cannot be given slabs of their own.

    Args:
        num_blocks: Number of blocks that the scheduler gives to requests.

    Raises:
        MigrationError: A block is not one run of bytes, head by head, or caches are on several
            devices, shared by layers, of different shapes, or cut into smaller blocks.
    """
    tensors = list(kv_caches.values())
    has_one_head = all(tensor.dim() == 4 and tensor.shape[1] == 1 for tensor in tensors)
    if layout != PAGE_LAYOUT and not (has_one_head and layout == _OF_ONE_HEAD):
        raise MigrationError(
            f"this engine cannot migrate: its KV is laid out as {layout}, and not each block in "
            f"one run, head by head; start it with VLLM_KV_CACHE_LAYOUT={PAGE_LAYOUT}"
        )
    if any(tensor.dim() != 4 for tensor in tensors):
        raise MigrationError(
            "this engine cannot migrate: its KV has other dimensions than blocks, heads, tokens, "
            "and key and value"
        )
    if len({tensor.device for tensor in tensors}) != 1:
        raise MigrationError("this engine cannot migrate: its KV lies on several devices")
    if len({tensor.data_ptr() for tensor in tensors}) != len(tensors):
        raise MigrationError("this engine cannot migrate: layers share one KV cache")
    if len({(tensor.shape, tensor.dtype) for tensor in tensors}) != 1:
        raise MigrationError("this engine cannot migrate: its layers' KV differs in shape")
    if len(tensors[0]) > num_blocks:
        raise MigrationError(
            "this engine cannot migrate: its attention reads smaller blocks than those of the "
            f"cache: start it with a --block-size {len(tensors[0]) // num_blocks} times smaller"
        )
