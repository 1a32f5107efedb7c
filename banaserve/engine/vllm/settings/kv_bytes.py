"""Bytes of KV that one token has."""

from __future__ import annotations

from banaserve.engine.vllm.compat.config import VllmConfig


def kv_token_bytes(config: VllmConfig) -> int:
    """Returns K and V of one token in all layers, over all workers of an instance.

    With multi-head latent attention that is one latent vector a layer, which workers do not share
    out. A quantized KV cache has less: what this is for are ways, where too much errs to the near.
    """
    model, parallel = config.model_config, config.parallel_config
    if model.use_mla:
        vectors = 1
    else:
        vectors = 2 * model.get_num_kv_heads(parallel) * parallel.tensor_parallel_size
    return model.get_num_layers(parallel) * vectors * model.get_head_size() * model.dtype.itemsize
