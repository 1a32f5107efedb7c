"""Files of a LoRA adapter with random weights."""

from __future__ import annotations

import json
from pathlib import Path

RANK = 8


def write_adapter(folder: Path, seed: int, num_layers: int, hidden: int, kv_hidden: int) -> None:
    """An adapter whose keys and values are others for each seed."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(num_layers):
        for name in ("k_proj", "v_proj"):
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{stem}.lora_A.weight"] = torch.randn(RANK, hidden, generator=generator) / 10
            weights[f"{stem}.lora_B.weight"] = (
                torch.randn(kv_hidden, RANK, generator=generator) / 10
            )
    save_file(weights, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "bias": "none"}
    settings |= {"target_modules": ["k_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
