"""vLLM's configuration and platform."""

from __future__ import annotations

from typing import Any

from vllm.config import (
    CompilationMode,
    CUDAGraphMode,
    ModelConfig,
    ParallelConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.usage.usage_lib import UsageContext

__all__ = [
    "CUDAGraphMode",
    "CompilationMode",
    "ModelConfig",
    "ParallelConfig",
    "UsageContext",
    "VllmConfig",
    "set_current_vllm_config",
]


def element_bytes(model: ModelConfig) -> int:
    """Return the size of a number of the model's type, in bytes."""
    dtype: Any = model.dtype  # a type of torch once the configuration is made
    return int(dtype.itemsize)


def kv_token_bytes(config: VllmConfig) -> int:
    """Return the bytes of one token's K and V in all layers, over all workers of an instance.

    With multi-head latent attention that is one latent vector per layer, which is not divided among
    workers. A quantized KV cache has fewer bytes: the result serves to weigh distances between
    instances, where too large a value favours near ones.
    """
    model, parallel = config.model_config, config.parallel_config
    if model.use_mla:
        vectors = 1
    else:
        vectors = 2 * model.get_num_kv_heads(parallel) * parallel.tensor_parallel_size
    return model.get_num_layers(parallel) * vectors * model.get_head_size() * element_bytes(model)


def is_on_cpu() -> bool:
    """Return whether this vLLM computes on a CPU."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def import_kernels() -> None:
    """Load vLLM's compiled kernels for this machine's device into ``torch.ops``."""
    from vllm.platforms import current_platform

    current_platform.import_kernels()


def own_budget(config: VllmConfig) -> tuple[int, int]:
    """Return vLLM's limits of tokens per step and of requests that run at once.

    A runner's buffers have these sizes, so larger limits are not possible at run time.
    """
    scheduler = config.scheduler_config
    tokens = scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens
    return tokens, scheduler.max_num_active_seqs or scheduler.max_num_seqs


def adopt_kernels(config: VllmConfig) -> None:
    """Make this process compute vLLM's operations with the kernels that a worker of it would use.

    vLLM's workers do the same when they start; a guest has no worker. Without it RMSNorm, for
    example, is computed by other kernels than in the host, and rounds differently.
    """
    from vllm.ir import set_default_torch_wrap

    config.kernel_config.ir_op_priority.set_default()
    set_default_torch_wrap(config.compilation_config.ir_enable_torch_wrap)


def adopt_kv_layout(config: VllmConfig, layout: str, block_size: int) -> None:
    """Record the layout and block size that an engine core chose after it got its configuration.

    Raises:
        ValueError: Another layout was adopted before.
    """
    from vllm.v1.attention.backends.utils import record_kv_cache_layout

    config.cache_config.block_size = block_size
    record_kv_cache_layout(config.cache_config, layout)
