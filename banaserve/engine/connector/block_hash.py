"""Keys of KV blocks: vLLM's chained block hashes, valid for one fingerprint of model and layout.

The fingerprint covers everything else that determines the bytes of a block: weights, quantization,
overrides, attention layout and hash seed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
import xxhash
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from banaserve.base.errors import UserError
from banaserve.base.models.files import add_files
from banaserve.engine.compat import kv_cache as compat
from banaserve.engine.compat.config import ModelConfig, ParallelConfig, VllmConfig
from banaserve.engine.compat.kv_cache import FullAttentionSpec, KVCacheConfig, MLAAttentionSpec
from banaserve.engine.connector.cache_groups import CacheGroups, describe_states
from banaserve.engine.migration_settings import packs_nothing, settings_of
from banaserve.kvstore.fingerprint import Fingerprint

_BY_HEAD = frozenset({"LBHNC", "BLHNC", "LHBNC", "BHLNC"})
"""vLLM's layouts in which a page in the store has its heads one after another."""


def describe_weights(model_config: Any, load_format: str) -> str:
    """Return 32 hex digits that differ where the weights, or their use by the engine, differ.

    Only some pages of a model's large files are read: see ``models/files.py``.

    Args:
        load_format: vLLM's load format; only whether the weights are real counts.

    Raises:
        OSError: A file of the model cannot be read.
    """
    overrides = model_config.hf_overrides
    if callable(overrides):
        overrides = f"{overrides.__module__}.{overrides.__qualname__}"
    media = model_config.multimodal_config
    said = {
        "quantization": model_config.quantization,
        # Hashes of blocks cover what a request says of its images, not what the server does.
        "media": media and (media.mm_processor_kwargs, media.media_io_kwargs),
        "overrides": overrides,
        "dummy": load_format == "dummy",
        "length": _length(model_config),
        "config": model_config.config_format,
    }
    digest = xxhash.xxh3_128(msgspec.json.encode(said, order="sorted", enc_hook=str))
    for name in filter(None, (model_config.model, model_config.hf_config_path)):
        folder = _local(str(name), model_config.revision, "config.json", "params.json")
        add_files(digest, folder)
    return digest.hexdigest()


def describe_adapter(path: str) -> str:
    """Return 32 hex digits that differ where a LoRA adapter's weights or settings differ.

    Args:
        path: Folder of the adapter or its name on the hub, as it was loaded.

    Raises:
        OSError: A file of the adapter cannot be read.
    """
    digest = xxhash.xxh3_128()
    add_files(digest, _local(os.path.expanduser(path), None, "adapter_config.json"))
    return digest.hexdigest()


def _length(model_config: Any) -> int | None:
    """Return the maximum context if it affects the positions of short ones too, as in LongRoPE."""
    config = model_config.hf_text_config
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return int(model_config.max_model_len) if "long_factor" in rope else None


def _local(model: str, revision: str | None, *configs: str) -> Path:
    """Return the path of a model's files: ``model``, or the hub's snapshot with a config."""
    # Not every name is a valid name of the hub: it may be the URL of a bucket, for instance.
    with suppress(HFValidationError):
        for config in () if Path(model).exists() else configs:
            cached = try_to_load_from_cache(model, config, revision=revision)
            if isinstance(cached, str):
                return Path(cached).parent
    return Path(model)


def describe_blocks(config: VllmConfig, kv_cache_config: KVCacheConfig) -> Fingerprint:
    """Return all that two instances must agree on before they read each other's blocks.

    Raises:
        UserError: The model's KV cache is not one group of uniform attention layers beside groups
            of states, or its parts are not those of tensor-parallel ranks.
    """
    transfer = config.kv_transfer_config
    assert transfer is not None, "an engine without a connector has no fingerprint"
    groups = CacheGroups.of(kv_cache_config)
    spec = _attention_spec(kv_cache_config)
    states = describe_states(groups, kv_cache_config)
    is_latent = isinstance(spec, MLAAttentionSpec)
    model, parallel = config.model_config, config.parallel_config
    check_parallel(parallel)
    num_ranks = parallel.tensor_parallel_size
    layout = str(kv_cache_config.kv_cache_layout or "default")
    is_by_head = not is_latent and not states and layout in _BY_HEAD
    num_parts = 1 if is_by_head or is_latent else num_ranks
    return Fingerprint(
        model=str(model.model),
        revision=str(model.revision or ""),
        dtype=str(model.dtype),
        # The tensor's type alone does not distinguish one kind of FP8 from another.
        kv_cache_dtype=f"{config.cache_config.cache_dtype}, {spec.dtype}",
        block_size_tokens=spec.block_size,
        num_layers=groups.num_rows,
        num_kv_heads=1 if is_latent else spec.num_kv_heads * num_ranks,
        head_size=spec.head_size,
        layout=layout,
        isa=_instruction_set(config, spec),
        page_bytes=spec.page_size_bytes * (num_ranks if is_by_head else 1),
        num_parts=num_parts,
        salt=str(transfer.get_from_extra_config("salt", "")),
        probe=_probe(config, spec.block_size),
        weights=describe_weights(model, str(config.load_config.load_format)),
        attention="mla" if is_latent else f"full, {states}" if states else "full",
    )


def page_bytes(kv_cache_config: KVCacheConfig) -> int:
    """Return the bytes of one layer's block in this rank's KV cache."""
    return int(_attention_spec(kv_cache_config).page_size_bytes)


def check_model(model_config: ModelConfig) -> None:
    """Check that all data that the model keeps of a sequence is in blocks that can be shared.

    What only the layout of the KV cache shows is checked by ``describe_blocks`` and
    ``check_latents``.

    Raises:
        UserError: The model keeps other data, which a fetched block would lack.
    """
    what = ""
    has_states = model_config.is_attention_free or model_config.has_inner_state
    if has_states and not model_config.is_hybrid:
        what = "keeps states of Mamba or linear-attention layers alone"
    elif model_config.is_hybrid and model_config.use_mla:
        what = "keeps states of linear-attention layers beside latents (MLA)"
    elif model_config.is_encoder_decoder:
        what = "keeps what its encoder has read"
    if what:
        raise UserError(
            f"{model_config.architecture} {what}, which the KV cache store does not share yet, so "
            "that prefill could not hand over to decode; serve it without the store: --colocated N "
            "--no-kv-store"
        )


def check_parallel(parallel: ParallelConfig) -> None:
    """Check that each worker has its own heads of every layer and of every token of a block.

    Raises:
        UserError: The workers share the model in another way.
    """
    stages = parallel.pipeline_parallel_size
    contexts = parallel.prefill_context_parallel_size * parallel.decode_context_parallel_size
    if stages * contexts > 1:
        raise UserError(
            "the KV cache store shares blocks of tensor parallel engines, not of pipeline or "
            "context parallel ones: use --tensor-parallel-size, or serve without the store: "
            "--colocated N --no-kv-store"
        )


def check_degrees(model: ModelConfig, degrees: Collection[int]) -> None:
    """Check that engines of these tensor-parallel degrees can read each other's blocks.

    What only the layout of the KV cache shows is checked by the blocks' fingerprints: heads have to
    follow one another, as on CPUs and with VLLM_KV_CACHE_LAYOUT=LBHNC. Latents (MLA) are the same
    in each rank.

    Raises:
        UserError: Ranks of some degree would have heads in common, or the model keeps states.
    """
    if len(degrees) < 2:
        return
    if model.is_hybrid:
        raise UserError(
            f"{model.architecture} keeps states of Mamba or linear-attention layers, which are not "
            "shared out among other numbers of ranks: give prefill and decode one "
            "--tensor-parallel-size"
        )
    if model.use_mla:
        return
    heads = model.get_total_num_kv_heads()
    if odd := [degree for degree in degrees if heads % degree]:
        raise UserError(
            f"{heads} KV heads cannot be shared out among {max(odd)} ranks: give degrees that "
            "divide them, or one --tensor-parallel-size for prefill and decode"
        )


def _attention_spec(kv_cache_config: KVCacheConfig) -> FullAttentionSpec:
    groups = CacheGroups.of(kv_cache_config)
    return cast(FullAttentionSpec, kv_cache_config.kv_cache_groups[groups.attention].kv_cache_spec)


def _instruction_set(config: VllmConfig, spec: FullAttentionSpec) -> str:
    """Return the instruction set for which K is packed in a block, which is part of the layout.

    vLLM's attention on CPU packs K. "plain": nothing is packed, as by our kernels and by attention
    to latents, which are one row per token. "cuda": on GPUs.
    """
    if torch.cuda.is_available():
        return "cuda"
    if isinstance(spec, MLAAttentionSpec) or packs_nothing(settings_of(config)):
        return "plain"
    return compat.cpu_instruction_set(spec)


def _probe(config: VllmConfig, block_size: int) -> str:
    """Return the hash of a known block, which differs where seeds or hash algorithms differ."""
    hash_function = compat.get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    compat.init_none_hash(hash_function)
    return compat.hash_block_tokens(hash_function, None, range(block_size), None).hex()


class TailHasher:
    """Hasher of partial last blocks, chained to the full blocks before them, and of prefixes.

    A tail's token tuple is shorter than any full block's, so its key never equals a full block's.
    """

    def __init__(self, config: VllmConfig, block_size: int) -> None:
        self._config = config
        self._hash: Callable[[Any], bytes] = compat.get_hash_fn_by_name(
            config.cache_config.prefix_caching_hash_algo
        )
        self._block_size = block_size

    def key(self, request: compat.Request, num_tokens: int) -> bytes | None:
        """Return the key of the partial block that ends ``num_tokens`` tokens, or None."""
        start = num_tokens - num_tokens % self._block_size
        if start == num_tokens or request.prompt_embeds is not None:
            return None
        full = start // self._block_size
        parent = request.block_hashes[full - 1] if full else None
        extra, _ = compat.generate_block_hash_extra_keys(request, start, num_tokens, 0)
        return compat.hash_block_tokens(
            self._hash, parent, request.all_token_ids[start:num_tokens], extra
        )

    def prefix(self, request: compat.Request, num_tokens: int) -> bytes | None:
        """Return the key of the full or partial block that ends ``num_tokens`` tokens, or None."""
        if num_tokens % self._block_size:
            return self.key(request, num_tokens)
        full = num_tokens // self._block_size
        return request.block_hashes[full - 1] if 0 < full <= len(request.block_hashes) else None

    def rehash(self, request: compat.Request) -> None:
        """Recompute a request's block hashes for this block size, where vLLM's size is another."""
        compat.rehash(request, self._hasher)

    @cached_property
    def _hasher(self) -> Callable[[compat.Request], list[Any]]:
        return compat.block_hasher(self._config, self._block_size)
