"""Tiny models of many families: random weights, and the tokenizer of the packaged model.

Their shapes are those that decide how a family's KV lies: latents, windows, states, experts. Wide
enough weights keep the best token far from the next one.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from banaserve.base import models

SEED = 3
SPREAD = 0.08
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")

_COMMON = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": SPREAD,
    "tie_word_embeddings": False,
}
# The least that kernels of ours know, without which older blocks do not move.
_HEAD = 64
# The only latents that vLLM 0.32 decodes on a CPU without AMX: 512 and 64 for the positions.
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "moe_intermediate_size": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}
_MAMBA = {
    "mamba_d_ssm": 128,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 64,
}

ADAPTED = (4, 128, 128)
"""Layers, hidden size and that of all KV heads, of a Llama: what a LoRA adapter has to fit."""

FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        **_LATENT,
        "q_lora_rank": None,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
    },
    "deepseek_v3": {
        **_LATENT,
        "q_lora_rank": 96,
        "n_routed_experts": 8,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "n_group": 2,
        "topk_group": 1,
    },
    "llama": {"head_dim": _HEAD},
    "qwen3_moe": {
        "head_dim": _HEAD,
        "moe_intermediate_size": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "gpt_oss": {"head_dim": _HEAD, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma3_text": {"head_dim": _HEAD, "sliding_window": 64, "sliding_window_pattern": 2},
    "granite": {
        "head_dim": _HEAD,
        "attention_multiplier": 0.125,
        "residual_multiplier": 0.8,
        "logits_scaling": 2.0,
    },
    # Its heads share the hidden size out.
    "phi3": {"num_attention_heads": 2, "sliding_window": None},
    "granitemoehybrid": {
        **_MAMBA,
        "mamba_n_heads": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 64,
        "layer_types": ["mamba", "attention", "mamba", "attention"],
    },
    "falcon_h1": {**_MAMBA, "head_dim": 32},
    "qwen3_next": {
        # Sizes of heads that vLLM's kernels for CPUs know, and a state no larger than 256 tokens.
        "head_dim": 128,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "full_attention_interval": 2,
    },
}
"""What each says beside what all have."""


def make(family: str, folder: Path, **changes: Any) -> str:
    """Write a model of the family; returns its folder. The same for the same arguments.

    Args:
        folder: Becomes the model's; its parent has to be there.
        changes: Of its configuration.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    packaged = Path(models.resolve(models.PACKAGED, None, print).path_or_id)
    known = json.loads((packaged / "config.json").read_text(encoding="utf-8"))
    special = {key: known[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    shape = {**_COMMON, **special, "vocab_size": known["vocab_size"], **FAMILIES[family]}
    torch.manual_seed(SEED)
    config = AutoConfig.for_model(family, **{**shape, **changes})
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    for name in _TOKENIZER_FILES:
        if (packaged / name).exists():
            shutil.copy(packaged / name, folder / name)
    return str(folder)


def make_encoder(folder: Path) -> str:
    """Write a BERT, whose tokens look at all others: it answers with embeddings alone."""
    import torch
    from transformers import BertConfig, BertModel

    packaged = Path(models.resolve(models.PACKAGED, None, print).path_or_id)
    known = json.loads((packaged / "config.json").read_text(encoding="utf-8"))
    torch.manual_seed(SEED)
    shape = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2}
    config = BertConfig(**shape, num_attention_heads=4, vocab_size=known["vocab_size"])
    BertModel(config).float().save_pretrained(folder)
    for name in _TOKENIZER_FILES[:2]:
        shutil.copy(packaged / name, folder / name)
    return str(folder)


_IMAGE_TOKENS = ("<fake_token_around_image>", "<image>", "<global-img>", "<end_of_utterance>")
IMAGE_PIXELS = 64
_CHAT = (
    "{% for m in messages %}{% if m['content'] is string %}{{m['content']}}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'image' %}<image>{% else %}"
    "{{part['text']}}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)


def make_seeing(folder: Path) -> str:
    """Write an Idefics3: a Llama that sees images of ``IMAGE_PIXELS`` as 16 tokens each."""
    import torch
    from transformers import (
        AutoTokenizer,
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        Idefics3ImageProcessor,
        Idefics3Processor,
    )

    packaged = Path(models.resolve(models.PACKAGED, None, print).path_or_id)
    known = json.loads((packaged / "config.json").read_text(encoding="utf-8"))
    tokenizer = AutoTokenizer.from_pretrained(packaged)
    tokenizer.add_special_tokens({"additional_special_tokens": list(_IMAGE_TOKENS)})
    special = {key: known[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    vocabulary = known["vocab_size"] + 64
    torch.manual_seed(SEED)
    text = {**_COMMON, "head_dim": _HEAD, "vocab_size": vocabulary, "model_type": "llama"}
    sees = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "patch_size": 8}
    config = Idefics3Config(
        text_config={**text, **special},
        vision_config={
            **sees,
            "num_attention_heads": 2,
            "image_size": IMAGE_PIXELS,
            "initializer_range": SPREAD,
        },
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        tie_word_embeddings=False,
        initializer_range=SPREAD,
        **special,
    )
    Idefics3ForConditionalGeneration(config).float().save_pretrained(folder)
    size = {"longest_edge": IMAGE_PIXELS}
    images = Idefics3ImageProcessor(do_image_splitting=False, size=size, max_image_size=size)
    processor = Idefics3Processor(images, tokenizer, image_seq_len=16, chat_template=_CHAT)
    processor.save_pretrained(folder)
    return str(folder)


def make_drafter(folder: Path, model: str) -> str:
    """Write an EAGLE head for a Llama: one layer that guesses at the next token, mostly wrong."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    known = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    config = LlamaConfig(**{**known, "num_hidden_layers": 1})
    torch.manual_seed(SEED + 2)
    weights = LlamaForCausalLM(config).float().state_dict()
    # It has no norm before its layer: it reads a token beside what the model made of the last one.
    layer = {
        name.removeprefix("model."): weight.contiguous()
        for name, weight in weights.items()
        if "layers.0." in name and "input_layernorm" not in name
    }
    half = torch.eye(config.hidden_size) / 2
    layer["fc.weight"] = torch.cat([half, half], dim=1)
    folder.mkdir()
    save_file(layer, folder / "model.safetensors")
    said = {**config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(said), encoding="utf-8")
    return str(folder)
