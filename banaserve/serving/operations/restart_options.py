"""Checks of options and models that engines may change to while the front door stays unchanged.

The front door tokenises and validates requests, and applies timeouts, with the configuration of its
start; the store's pool is divided into blocks of one size.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from banaserve.base.errors import UserError
from banaserve.engine.compat.config import VllmConfig

# A list of the options that may change: an option of a later vLLM is refused until reviewed.
_MAY_CHANGE = frozenset(
    {
        "--async-scheduling",
        "--attention-backend",
        "--compilation-config",
        "--cpu-offload-gb",
        "--cudagraph-capture-sizes",
        "--disable-cascade-attn",
        "--disable-custom-all-reduce",
        "--download-dir",
        "--dtype",
        "--enable-chunked-prefill",
        "--enable-flashinfer-autotune",
        "--enforce-eager",
        "--gpu-memory-utilization",
        "--ignore-patterns",
        "--kernel-config",
        "--kv-cache-memory-bytes",
        "--linear-backend",
        "--load-format",
        "--long-prefill-token-threshold",
        "--max-cpu-loras",
        "--max-cudagraph-capture-size",
        "--max-loras",
        "--max-model-len",
        "--max-num-batched-tokens",
        "--max-num-seqs",
        "--model-loader-extra-config",
        "--moe-backend",
        "--num-gpu-blocks-override",
        "--optimization-level",
        "--performance-mode",
        "--pt-load-map-location",
        "--quantization",
        "--safetensors-load-strategy",
        "--seed",
        "--use-tqdm-on-load",
    }
)
_SHORT = {"-O": "--optimization-level", "-cc": "--compilation-config", "-q": "--quantization"}
_SHAPE = (
    "architectures",
    "model_type",
    "vocab_size",
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "kv_lora_rank",
    "qk_rope_head_dim",
)
_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_SAYS_NOTHING = frozenset({"transformers_version", "_from_model_config", "name_or_path"})


def check_options(words: Sequence[str]) -> None:
    """Return if vLLM's options that a restart adds concern only the engines.

    Raises:
        UserError: An option concerns more than the engines; the message says what to do.
    """
    for word in words:
        if not word.startswith("-") or _is_number(word):
            continue
        given = word.split("=")[0]
        name = _SHORT.get(given[:2] if given.startswith("-O") else given, given)
        name = name.split(".")[0].replace("_", "-")
        if name == "--model":
            raise UserError(f"{given}: give the model before --, where it is banaserve's")
        if {name, name.replace("--no-", "--", 1)}.isdisjoint(_MAY_CHANGE):
            raise UserError(
                f"{given} cannot change while the server runs: the front door, the store or other "
                "instances go by it; end the server and start it with it"
            )


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def check_fits(before: VllmConfig, after: VllmConfig, max_model_len: int, has_store: bool) -> None:
    """Return if engines of ``after`` can serve behind a front door that was made for ``before``.

    Args:
        max_model_len: Maximum context length that the front door accepts, in tokens.
        has_store: True if there is a store, whose blocks must keep their size.

    Raises:
        UserError: The engines cannot serve; the message has the first reason.
    """
    old, new = before.model_config, after.model_config
    for name in _SHAPE:
        was, is_now = (getattr(one.hf_text_config, name, None) for one in (old, new))
        if was != is_now:
            raise UserError(
                f"{new.model}: its {name} is {is_now}, and that of the model that is served is "
                f"{was}: another model needs a server of its own"
            )
    if new.max_model_len < max_model_len:
        raise UserError(
            f"a context of {new.max_model_len} tokens is shorter than the {max_model_len} up to "
            "which the front door takes prompts: give at least --max-model-len "
            f"{max_model_len}"
        )
    if has_store:
        _check_blocks(before, after)
    if old.get_diff_sampling_param() != new.get_diff_sampling_param():
        raise UserError(
            f"{new.model}: its generation_config.json has other defaults of sampling, which the "
            "front door would not apply: make them those of the model that is served, or start "
            "the server anew"
        )
    _check_ends(old, new)
    _check_tokenizer(Path(str(old.tokenizer)), Path(str(new.tokenizer)))


def _check_blocks(before: VllmConfig, after: VllmConfig) -> None:
    old, new = before.model_config, after.model_config
    for what, was, is_now in (
        ("--dtype", old.dtype, new.dtype),
        ("--kv-cache-dtype", before.cache_config.cache_dtype, after.cache_config.cache_dtype),
        ("--block-size", before.cache_config.block_size, after.cache_config.block_size),
    ):
        if was != is_now:
            raise UserError(
                f"{what} would be {is_now} and is {was}: the store's memory is cut into blocks of "
                f"that size; give {what} {str(was).removeprefix('torch.')}"
            )


def _check_ends(old: Any, new: Any) -> None:
    was, is_now = (one.try_get_generation_config().get("eos_token_id") for one in (old, new))
    if was != is_now:
        raise UserError(
            f"{new.model}: its answers end with token {is_now} by its generation_config.json, and "
            f"those of the model that is served with {was}: make them the same"
        )


def _check_tokenizer(old: Path, new: Path) -> None:
    if old == new:
        return
    for name in _TOKENIZER:
        if _meaning(old / name) != _meaning(new / name):
            raise UserError(
                f"{new}: its {name} is not that of {old}: the front door goes on with the "
                "tokenizer that it has, so new weights need the same one"
            )


def _meaning(path: Path) -> Any:
    """Return a file's content, parsed if it is JSON; None if the file cannot be read."""
    try:
        found = path.read_bytes()
    except OSError:
        return None
    if path.suffix != ".json":
        return found
    try:
        said = json.loads(found)
    except ValueError:
        return found
    if isinstance(said, dict):
        return {key: value for key, value in said.items() if key not in _SAYS_NOTHING}
    return said
