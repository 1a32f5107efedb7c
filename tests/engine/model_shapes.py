"""What vLLM's configuration says of a small model's shape."""

from __future__ import annotations

from types import SimpleNamespace

import torch


def configured(*, use_mla: bool = False, workers: int = 1) -> SimpleNamespace:
    """Returns model_config and parallel_config: 4 layers, 2 KV heads a worker of 8, in float16."""
    model = SimpleNamespace(
        use_mla=use_mla,
        dtype=torch.float16,
        get_num_layers=lambda _: 4,
        get_num_kv_heads=lambda _: 2,
        get_head_size=lambda: 8,
    )
    parallel = SimpleNamespace(tensor_parallel_size=workers)
    return SimpleNamespace(model_config=model, parallel_config=parallel)
