"""Shape of a model, read from its config.json."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from banaserve.base.errors import UserError
from banaserve.orchestrator.control.costs.profile import ModelSection

_ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_MOST = 10**9


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
Found = TypeVar("Found")


def read_shape(path: Path) -> ModelSection:
    """Return the shape of the model whose folder or config.json is ``path``.

    Raises:
        UserError: The file cannot be read, or has no shape of a decoder with K and V of all heads.
    """
    return _of_config(path, _shape)


def read_experts(path: Path) -> tuple[int, int] | None:
    """Return the number of experts of a layer, and of those that a token uses; None if dense.

    Raises:
        UserError: As ``read_shape``.
    """
    return _of_config(path, _experts)


def _of_config(path: Path, find: Callable[[Mapping[str, Any]], Found]) -> Found:
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_bytes())
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, Mapping):
        raise UserError(f"{file} is no config.json of a model")
    inner = config.get("text_config")
    config = {**config, **inner} if isinstance(inner, Mapping) else config
    if "kv_lora_rank" in config:
        raise UserError(f"{file}: latent attention (MLA) has no KV heads, which a profile needs")
    try:
        return find(config)
    except (KeyError, ValueError) as error:
        raise UserError(f"{file} has no shape of a decoder that a profile can have: {error}") from (
            error
        )


def _shape(config: Mapping[str, Any]) -> ModelSection:
    hidden = _number(config, "hidden_size")
    heads = _number(config, "num_attention_heads")
    kv_heads = _number(config, "num_key_value_heads", usual=heads)
    head_dim = _number(config, "head_dim", usual=hidden // heads)
    dtype = str(config.get("torch_dtype", config.get("dtype", "bfloat16")))
    is_tied = config.get("tie_word_embeddings") is True
    attention = 2 * hidden * heads * head_dim + 2 * hidden * kv_heads * head_dim
    return ModelSection(
        num_layers=_number(config, "num_hidden_layers"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        layer_weights=attention + _feed_forward(config, hidden) + 2 * hidden,
        fixed_weights=_number(config, "vocab_size") * hidden * (1 if is_tied else 2),
        max_context_tokens=_number(config, "max_position_embeddings", usual=_MOST // 100),
        element_bytes=_ELEMENT_BYTES.get(dtype, 2),
        head_size=head_dim,
    )


def _feed_forward(config: Mapping[str, Any], hidden: int) -> int:
    """Return the number of parameters of a layer's feed-forward network, with all its experts."""
    if "ffn_dim" in config:
        return 2 * hidden * _number(config, "ffn_dim")
    width = _number(config, "intermediate_size")
    experts = _num_experts(config)
    if experts > 1:
        width = _number(config, "moe_intermediate_size", usual=width)
    return experts * 3 * hidden * width


def _experts(config: Mapping[str, Any]) -> tuple[int, int] | None:
    experts = _num_experts(config)
    return (experts, _number(config, "num_experts_per_tok")) if experts > 1 else None


def _num_experts(config: Mapping[str, Any]) -> int:
    return next((_number(config, name) for name in _EXPERTS if config.get(name)), 1)


def _number(config: Mapping[str, Any], key: str, usual: int | None = None) -> int:
    value = config.get(key)
    if value is None and usual is not None:
        return usual
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST:
        shown = "missing" if value is None else repr(value)[:40]
        raise ValueError(f"{key} is {shown}")
    return value
