"""Bytes of KV per token."""

from __future__ import annotations

from banaserve.engine.compat.config import VllmConfig, element_bytes


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
