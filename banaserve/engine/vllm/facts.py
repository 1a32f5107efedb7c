"""What of an instance stays as it is, for the policies, from vLLM's configuration."""

from __future__ import annotations

from vllm.config import VllmConfig

from banaserve.engine.vllm.moves.sizes import ModelFacts
from banaserve.types import InstanceFacts


def instance_facts(
    config: VllmConfig, model: ModelFacts, kv_growth: float, can_move: bool, can_switch_role: bool
) -> InstanceFacts | None:
    """Returns the facts of an engine that runs ``config``; None where nothing can be said of it.

    Its KV blocks have memory of their own: what moves away frees the bytes of its KV for more
    blocks, weights and guests take other memory (see ``migration/host_kv.py``).

    Args:
        config: Of an engine that has started, so that it says how many KV blocks it has.
        kv_growth: How many times these it may once have.
        can_move: Whether layers and heads can leave it or come to it.
    """
    num_blocks = config.cache_config.num_gpu_blocks
    block_tokens = config.cache_config.block_size
    if not num_blocks or not block_tokens or model.num_kv_heads < 1:
        return None
    settings = config.model_config
    element_bytes = settings.dtype.itemsize
    num_heads = settings.get_num_attention_heads(config.parallel_config)
    token_bytes = 2 * model.num_kv_heads * settings.get_head_size() * element_bytes
    kv_bytes = num_blocks * block_tokens * token_bytes * model.num_layers
    return InstanceFacts(
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        layer_weight_bytes=model.layer_weight_bytes,
        layer_token_bytes=token_bytes,
        block_tokens=block_tokens,
        memory_bytes=kv_bytes + model.num_layers * model.layer_weight_bytes,
        hidden_bytes=settings.get_hidden_size() * element_bytes,
        queries_a_head=max(1, num_heads // model.num_kv_heads),
        kv_bytes=kv_bytes,
        max_kv_blocks=max(num_blocks, int(num_blocks * kv_growth)),
        can_move_layers=can_move,
        can_move_heads=can_move,
        can_switch_role=can_switch_role,
    )
