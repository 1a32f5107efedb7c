"""Miniature models, whose steps cost almost nothing, for runs in modelled time.

A miniature has random weights of the Llama architecture, layers and KV heads in the proportions of
a modelled model, and the tokenizer of the packaged model.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from banaserve.base import models
from banaserve.base.models import cache

HIDDEN_SIZE = 64
HEAD_SIZE = 32
"""Smallest head size that vLLM's attention on CPU supports."""
ELEMENT_BYTES = 4
MAX_LAYERS = 8
# To be raised whenever the written files change.
_FORMAT_VERSION = 2
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_SPREAD = 0.08
"""Standard deviation of the weights: wide enough that the best token is rarely close to the second
best."""


@dataclass(frozen=True, slots=True)
class Miniature:
    """Dimensions of a miniature; everything else is the same for all miniatures.

    Attributes:
        hidden_size: Hidden size: a multiple of the number of heads, as transformers requires.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    max_context_tokens: int
    hidden_size: int = HIDDEN_SIZE
    head_size: int = HEAD_SIZE

    @classmethod
    def of(
        cls, num_layers: int, num_heads: int, num_kv_heads: int, max_context_tokens: int
    ) -> Miniature:
        """Return the miniature of a model with these dimensions.

        Each layer of the miniature stands for the same number of the model's layers, and each KV
        head for the same number of its KV heads, so a fraction of the miniature's layers or heads
        is the same fraction of the model's. The number of KV heads is the smallest from two on, so
        that some can move: a CPU's work for a long prompt grows with layers times heads.
        """
        layers = max(d for d in range(1, MAX_LAYERS + 1) if num_layers % d == 0)
        kv_heads = min((d for d in range(2, num_kv_heads + 1) if num_kv_heads % d == 0), default=1)
        queries_a_head = min(2, num_heads // num_kv_heads)
        return cls(layers, kv_heads * queries_a_head, kv_heads, max_context_tokens)

    @property
    def token_bytes(self) -> int:
        """Return the size of one token's K and V in all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_size * ELEMENT_BYTES


def resolve(
    miniature: Miniature,
    name: str,
    cache_dir: Path | None,
    progress: Callable[[str], None],
) -> models.ResolvedModel:
    """Return the miniature as a model; make it if that has not been done. Blocking.

    Args:
        name: Name of the model in the API.
        cache_dir: Folder of models; None for the user's cache.

    Raises:
        UserError: The packaged model, whose tokenizer the miniature uses, cannot be obtained.
    """
    packaged = models.resolve(models.PACKAGED, cache_dir, progress)
    told = json.dumps([_FORMAT_VERSION, asdict(miniature)])
    root = cache.cache_root() if cache_dir is None else cache_dir
    folder = root / "models" / f"miniature-{xxhash.xxh3_64_hexdigest(told.encode())}"
    source = Path(packaged.path_or_id)
    if cache.obtain(folder, lambda target: _write(miniature, source, target), progress):
        progress(f"made a miniature of {miniature.num_layers} layers in {folder}")
    return models.ResolvedModel(name, str(folder), served_name=name)


def _write(miniature: Miniature, packaged: Path, target: Path) -> None:
    from safetensors.numpy import save_file

    for name in _TOKENIZER_FILES:
        if (packaged / name).exists():
            shutil.copy(packaged / name, target / name)
    known = json.loads((packaged / "config.json").read_text(encoding="utf-8"))
    config = _config(miniature, known)
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    special = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (target / "generation_config.json").write_text(json.dumps(special) + "\n", encoding="utf-8")
    weights = dict(_weights(miniature, config["vocab_size"]))
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})


def _config(miniature: Miniature, packaged: dict[str, Any]) -> dict[str, Any]:
    return packaged | {
        "head_dim": miniature.head_size,
        "hidden_size": miniature.hidden_size,
        "intermediate_size": miniature.hidden_size,
        "max_position_embeddings": miniature.max_context_tokens,
        "num_attention_heads": miniature.num_heads,
        "num_hidden_layers": miniature.num_layers,
        "num_key_value_heads": miniature.num_kv_heads,
        # With tied embeddings the likeliest token would always be the previous one.
        "tie_word_embeddings": False,
        "dtype": "float32",
        "torch_dtype": "float32",
    }


def _weights(
    miniature: Miniature, vocab_size: int
) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    random = np.random.default_rng(0)
    hidden = miniature.hidden_size
    ones = np.ones(hidden, np.float32)

    def matrix(rows: int, columns: int) -> npt.NDArray[np.float32]:
        return random.normal(0.0, _SPREAD, (rows, columns)).astype(np.float32)

    size = miniature.head_size
    queries, keys = miniature.num_heads * size, miniature.num_kv_heads * size
    yield "model.embed_tokens.weight", matrix(vocab_size, hidden)
    yield "lm_head.weight", matrix(vocab_size, hidden)
    yield "model.norm.weight", ones
    for layer in range(miniature.num_layers):
        stem = f"model.layers.{layer}"
        yield f"{stem}.input_layernorm.weight", ones
        yield f"{stem}.post_attention_layernorm.weight", ones
        yield f"{stem}.self_attn.q_proj.weight", matrix(queries, hidden)
        yield f"{stem}.self_attn.k_proj.weight", matrix(keys, hidden)
        yield f"{stem}.self_attn.v_proj.weight", matrix(keys, hidden)
        yield f"{stem}.self_attn.o_proj.weight", matrix(hidden, queries)
        for part in ("gate_proj", "up_proj", "down_proj"):
            yield f"{stem}.mlp.{part}.weight", matrix(hidden, hidden)
