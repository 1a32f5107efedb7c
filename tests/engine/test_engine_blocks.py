"""What engines say of their KV blocks, and which models have any to share."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

pytest.importorskip("vllm")

import torch
from vllm.config import ParallelConfig
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from banaserve.base.access.cache_salt import TenantSalt
from banaserve.base.errors import FingerprintError, MigrationError, UserError
from banaserve.engine.compat import kv_cache as compat
from banaserve.engine.connector.block_hash import (
    TailHasher,
    check_degrees,
    check_model,
    check_parallel,
    describe_blocks,
)
from banaserve.engine.connector.latent_layout import check_latents
from banaserve.engine.connector.worker_side.block_copy import make_copier
from banaserve.kvstore.fingerprint import Fingerprint, check_alike
from banaserve.migration.checks import check_heads

BLOCK_TOKENS = 16
LATENT = 576
NUM_LAYERS = 3
# A head whose key and value are together as long as a latent.
FULL = FullAttentionSpec(
    block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=LATENT // 2, dtype=torch.float32
)
MLA = MLAAttentionSpec(
    block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=LATENT, dtype=torch.float32
)


def config(ranks: int = 1) -> Any:
    model = SimpleNamespace(
        model="nobody/nothing",
        revision=None,
        dtype="float32",
        quantization=None,
        hf_overrides={},
        multimodal_config=None,
        config_format="auto",
        hf_config_path=None,
        max_model_len=512,
        hf_text_config=SimpleNamespace(),
    )
    parallel = SimpleNamespace(**{**vars(ParallelConfig()), "tensor_parallel_size": ranks})
    return SimpleNamespace(
        model_config=model,
        parallel_config=parallel,
        cache_config=SimpleNamespace(cache_dtype="auto", prefix_caching_hash_algo="sha256"),
        kv_transfer_config=SimpleNamespace(get_from_extra_config=lambda key, default: default),
        load_config=SimpleNamespace(load_format="auto"),
        additional_config={},
    )


def described(*specs: Any, ranks: int = 1, layout: str = "LBHNC") -> Fingerprint:
    names = [f"model.layers.{i}.self_attn" for i in range(NUM_LAYERS)]
    groups = [KVCacheGroupSpec(names, spec) for spec in specs]
    kv_cache: Any = SimpleNamespace(kv_cache_groups=groups, kv_cache_layout=layout)
    return describe_blocks(config(ranks), kv_cache)


def test_latents_and_heads_never_share_a_block() -> None:
    full, latent = described(FULL), described(MLA)
    assert full.slot_bytes == latent.slot_bytes
    assert (full.attention, latent.attention) == ("full", "mla")
    # Even where nothing else tells them apart.
    other = msgspec.structs.replace(latent, attention="full")
    assert other.namespace() != latent.namespace()
    with pytest.raises(FingerprintError, match=r"\(attention: mla and full\)"):
        check_alike([latent, other])


def test_a_latent_is_the_whole_of_a_block_in_every_rank() -> None:
    alone, two = described(MLA), described(MLA, ranks=2)
    page_bytes = BLOCK_TOKENS * LATENT * 4
    assert (alone.page_bytes, alone.num_kv_heads, alone.head_size) == (page_bytes, 1, LATENT)
    # No instruction set packs its rows.
    assert (alone.isa, alone.layout) == ("plain", "LBHNC")
    assert two == alone


def test_heads_one_behind_the_other_are_the_same_block_whatever_the_degree() -> None:
    whole = FullAttentionSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=4, head_size=LATENT // 2, dtype=torch.float32
    )
    half = FullAttentionSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=2, head_size=LATENT // 2, dtype=torch.float32
    )
    alone, two = described(whole), described(half, ranks=2)
    assert alone == two
    check_alike([alone, two])
    # More ranks than heads have some in common: no block of theirs is another's.
    assert described(FULL, ranks=2).namespace() != described(FULL).namespace()


def test_tokens_one_behind_the_other_are_not() -> None:
    whole = FullAttentionSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=2, head_size=LATENT // 2, dtype=torch.float32
    )
    alone, two = described(whole, layout="LBNHC"), described(FULL, ranks=2, layout="LBNHC")
    assert alone.slot_bytes == two.slot_bytes
    assert (alone.num_parts, two.num_parts) == (1, 2)
    with pytest.raises(FingerprintError, match="num_parts: 1 and 2"):
        check_alike([alone, two])


@pytest.mark.parametrize(
    ("degrees", "heads", "mla"),
    [({1, 2, 4}, 4, False), ({3}, 4, False), ({8}, 1, False), ({1, 8}, 1, True)],
)
def test_degrees_that_share_the_heads_out_may_differ(
    degrees: set[int], heads: int, mla: bool
) -> None:
    check_degrees(a_model(heads, mla=mla), degrees)


@pytest.mark.parametrize(
    ("degrees", "heads", "words"),
    [
        ({1, 8}, 4, "4 KV heads cannot be shared out among 8 ranks"),
        ({1, 3}, 4, "among 3 ranks"),
    ],
)
def test_degrees_with_heads_in_common_are_refused_in_one_line(
    degrees: set[int], heads: int, words: str
) -> None:
    with pytest.raises(UserError, match=words) as refused:
        check_degrees(a_model(heads), degrees)
    assert "\n" not in str(refused.value)


def a_model(heads: int, *, mla: bool = False) -> Any:
    return SimpleNamespace(
        use_mla=mla,
        is_hybrid=False,
        architecture="Nobody",
        get_total_num_kv_heads=lambda: heads,
    )


def test_states_are_not_shared_out_among_other_numbers_of_ranks() -> None:
    model = a_model(4)
    model.is_hybrid = True
    check_degrees(model, {2})
    with pytest.raises(UserError, match="one --tensor-parallel-size"):
        check_degrees(model, {1, 2})


@pytest.mark.parametrize("writers", [1, 2, 4])
def test_what_ranks_write_side_by_side_is_what_one_reads(writers: int) -> None:
    num_heads, num_blocks = 4, 3
    spec = FullAttentionSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=num_heads, head_size=4, dtype=torch.float32
    )
    fingerprint = described(spec)
    memory = np.zeros(num_blocks * fingerprint.slot_bytes, np.uint8)
    view: Any = SimpleNamespace(
        memory=memory,
        base_address=memory.ctypes.data,
        slot_bytes=fingerprint.slot_bytes,
        fingerprint=fingerprint,
    )
    shape = (num_blocks, num_heads, BLOCK_TOKENS, 8)
    layers = [torch.randn(shape) for _ in range(NUM_LAYERS)]
    order = np.array([2, 0, 1])
    each_bytes = fingerprint.page_bytes // writers
    for part in range(writers):
        heads = slice(part * num_heads // writers, (part + 1) * num_heads // writers)
        own = [layer[:, heads].contiguous() for layer in layers]
        copier = make_copier(own, each_bytes, part)
        for layer in range(NUM_LAYERS):
            copier.save(layer, view, np.arange(num_blocks), order, None)
    read = [torch.zeros(shape) for _ in range(NUM_LAYERS)]
    reader = make_copier(read, fingerprint.page_bytes, 0)
    for layer in range(NUM_LAYERS):
        reader.load(layer, view, np.arange(num_blocks), order, None)
    assert all(torch.equal(*both) for both in zip(read, layers, strict=True))


def test_blocks_of_latents_are_one_run_each() -> None:
    cache = torch.zeros(5, 1, BLOCK_TOKENS, LATENT)
    page_bytes = described(MLA).page_bytes
    make_copier([cache], page_bytes, 0)
    with pytest.raises(ValueError, match="one run"):
        make_copier([cache[:, :, ::2]], page_bytes // 2, 0)


def attention_that(write: Callable[..., None]) -> Any:
    impl = SimpleNamespace(do_kv_cache_update=write)
    return SimpleNamespace(impl=impl, kv_lora_rank=512, qk_rope_head_dim=64, kv_cache_dtype="auto")


def by_rows(values: Any, positions: Any, cache: Any, slots: Any, *_: Any) -> None:
    CPUMLAImpl.do_kv_cache_update(None, values, positions, cache, slots, "auto", None)


def by_columns(values: Any, positions: Any, cache: Any, slots: Any, *_: Any) -> None:
    """Packed in its block, as vLLM's other attention on CPU packs K."""
    for row, slot in zip(torch.cat([values, positions[:, 0]], dim=-1), slots.tolist(), strict=True):
        block, offset = divmod(slot, BLOCK_TOKENS)
        cache[block].view(LATENT, BLOCK_TOKENS)[:, offset] = row


def by_place(values: Any, positions: Any, cache: Any, slots: Any, *_: Any) -> None:
    """Bytes that say where their block lies."""
    by_rows(values + slots[:, None] // BLOCK_TOKENS, positions, cache, slots)


def past_the_block(values: Any, positions: Any, cache: Any, slots: Any, *_: Any) -> None:
    by_rows(values, positions, cache, slots)
    by_rows(values[-1:], positions[-1:], cache, slots[-1:] + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cpus_latents_are_one_row_a_token(dtype: torch.dtype) -> None:
    for shape in ((7, 1, BLOCK_TOKENS, LATENT), (7, BLOCK_TOKENS, LATENT)):
        cache = torch.ones(shape, dtype=dtype)
        check_latents(attention_that(by_rows), cache, dtype)
        assert bool((cache == 1).all())


@pytest.mark.parametrize("write", [by_columns, by_place, past_the_block, lambda *_: None])
def test_latents_that_lie_in_another_way_are_refused(write: Callable[..., None]) -> None:
    cache = torch.zeros(7, 1, BLOCK_TOKENS, LATENT)
    with pytest.raises(UserError, match="--colocated N --no-kv-store"):
        check_latents(attention_that(write), cache, torch.float32)


def image(name: str, offset: int = 1) -> list[MultiModalFeatureSpec]:
    return [MultiModalFeatureSpec(None, "image", name, PlaceholderRange(offset, 4))]


@pytest.mark.parametrize("length", [7, 2 * BLOCK_TOKENS + 7])
def test_of_equal_tokens_no_block_is_shared_where_anything_else_differs(length: int) -> None:
    adapters = [LoRARequest(f"a@{i}.{digest}", i, "path") for i, digest in ((1, "aa"), (2, "bb"))]
    kinds: list[dict[str, Any]] = [
        {},
        {"cache_salt": "salt"},
        {"cache_salt": str(TenantSalt("0" * 16, "salt"))},
        {"cache_salt": str(TenantSalt("1" * 16, "salt"))},
        *({"lora_request": adapter} for adapter in adapters),
        {"lora_request": adapters[0], "cache_salt": "salt"},
        *({"mm_features": image(name)} for name in ("one", "other")),
        {"mm_features": image("one", offset=2)},
        *({"prompt_embeds": torch.full((length, 4), value)} for value in (0.0, 1.0)),
    ]
    hasher, tails = compat.block_hasher(config(), BLOCK_TOKENS), TailHasher(config(), BLOCK_TOKENS)
    found: set[bytes] = set()
    for number, kind in enumerate(kinds):
        params = SamplingParams(max_tokens=1)
        tokens = None if "prompt_embeds" in kind else [0] * length
        request = compat.Request("r", tokens, params, None, block_hasher=hasher, **kind)
        tail = tails.key(request, length)
        assert (tail is None) == ("prompt_embeds" in kind)
        keys = {*request.block_hashes, *([tail] if tail else ())}
        assert len(keys) == length // BLOCK_TOKENS + (tail is not None), number
        assert not keys & found, number
        found |= keys


@pytest.mark.parametrize("specs", [(), (FULL, MLA), (FULL, FULL)])
def test_several_kinds_of_attention_are_refused(specs: tuple[Any, ...]) -> None:
    with pytest.raises(UserError, match="--no-kv-store"):
        described(*specs)


def test_a_window_of_its_own_is_refused() -> None:
    shape = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}
    with pytest.raises(UserError, match="--no-kv-store"):
        described(SlidingWindowSpec(**shape, sliding_window=64))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("is_attention_free", "states of Mamba or linear-attention layers"),
        ("has_inner_state", "states of Mamba or linear-attention layers"),
        ("is_encoder_decoder", "what its encoder has read"),
        ("is_hybrid use_mla", "beside latents"),
        ("is_hybrid has_inner_state", ""),
        ("use_mla", ""),
        ("", ""),
    ],
)
def test_a_model_that_keeps_more_than_blocks_is_refused(kind: str, words: str) -> None:
    kinds = ("is_hybrid", "is_attention_free", "has_inner_state", "is_encoder_decoder", "use_mla")
    model: Any = SimpleNamespace(
        architecture="SomeForCausalLM", **{name: name in kind.split() for name in kinds}
    )
    if not words:
        check_model(model)
        return
    with pytest.raises(UserError, match=words) as refused:
        check_model(model)
    assert str(refused.value).startswith("SomeForCausalLM ")
    assert "--colocated N --no-kv-store" in str(refused.value)


@pytest.mark.parametrize(
    ("sizes", "is_shared"),
    [
        ({}, True),
        ({"tensor_parallel_size": 4}, True),
        ({"pipeline_parallel_size": 2}, False),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, False),
        ({"prefill_context_parallel_size": 2}, False),
        ({"decode_context_parallel_size": 2}, False),
    ],
)
def test_ranks_that_share_a_block_in_another_way_are_refused_in_one_line(
    sizes: dict[str, int], is_shared: bool
) -> None:
    parallel: Any = SimpleNamespace(**{**vars(ParallelConfig()), **sizes})
    if is_shared:
        check_parallel(parallel)
        return
    with pytest.raises(UserError, match="not of pipeline or context parallel ones") as refused:
        check_parallel(parallel)
    assert "--colocated N --no-kv-store" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_heads_of_a_latent_cannot_leave_it() -> None:
    attention = SimpleNamespace(kv_lora_rank=512, impl=SimpleNamespace(), kv_cache_dtype="auto")
    with pytest.raises(MigrationError, match="one latent for all of its heads: move the whole"):
        check_heads(attention, "model.layers.0.self_attn")
    del attention.kv_lora_rank
    check_heads(attention, "model.layers.0.self_attn")
