"""Models of random weights with the shapes of real ones, for machines that download nothing."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from banaserve.base import models

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
Shape = Mapping[str, Any]


def _shape(
    *, hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, spread: float, **more: int
) -> Shape:
    """Return a configuration of transformers; weights are drawn with ``spread``."""
    return {
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "initializer_range": spread,
        **more,
    }


_TINY = partial(_shape, hidden=256, layers=8, heads=4, kv_heads=2, spread=0.08)
_EXPERTS = {"moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2}
SIZES: Mapping[str, tuple[str, Shape]] = {
    # Takes seconds on a laptop.
    "tiny": ("llama", _TINY(mlp=512)),
    "tiny-moe": ("qwen3_moe", _TINY(mlp=256, head_dim=64, **_EXPERTS)),
    # As Llama 3.2 1B and 3.1 8B, except for the vocabulary, which is the packaged model's.
    "1b": (
        "llama",
        _shape(hidden=2048, mlp=8192, layers=16, heads=32, kv_heads=8, spread=0.03, head_dim=64),
    ),
    "8b": ("llama", _shape(hidden=4096, mlp=14336, layers=32, heads=32, kv_heads=8, spread=0.02)),
}
"""Family and shape, by the name on the command line."""


@contextmanager
def random_weights(size: str, dtype: str) -> Iterator[str]:
    """Yield a folder with a model of random weights; it is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="random-model-") as folder:
        yield make_model(size, Path(folder), dtype)


def make_model(size: str, folder: Path, dtype: str) -> str:
    """Write a model with the packaged model's tokenizer; equal arguments give an equal model.

    Weights are drawn on the GPU if there is one: those of 8 billion take minutes on a CPU.

    Returns:
        The folder.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    packaged = Path(models.resolve(models.PACKAGED, None, lambda _: None).path_or_id)
    known = json.loads((packaged / "config.json").read_text(encoding="utf-8"))
    family, shape = SIZES[size]
    names = ("bos_token_id", "eos_token_id", "pad_token_id", "vocab_size")
    of_tokenizer = {name: known[name] for name in names if name in known}
    config = AutoConfig.for_model(family, **{**shape, **of_tokenizer})
    torch.manual_seed(3)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(folder)
    del model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # engines of other processes start only if most of it is free
    for name in _TOKENIZER_FILES:
        if (packaged / name).exists():
            shutil.copy(packaged / name, folder / name)
    return str(folder)
