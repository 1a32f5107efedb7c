"""Attention of a layer through the kernels of its device: what stands for vLLM's implementation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from banaserve.errors import MigrationError
from banaserve.kernels.interface import HEAD_SIZES, Batch, Heads, Kernels
from banaserve.kernels.layouts import KvLayout, key_value_views


class StepBatches:
    """What vLLM says of a step, as kernels take it: made for its first layer, kept for the rest."""

    def __init__(self) -> None:
        self._last: tuple[Any, Batch] | None = None

    def of(self, metadata: Any) -> Batch:
        """The batch of an attention's metadata, or of what that is built from.

        Raises:
            ValueError: Tokens see later ones.
        """
        if self._last is None or self._last[0] is not metadata:
            self._last = metadata, _batch_of(metadata)
        return self._last[1]


def _batch_of(metadata: Any) -> Batch:
    if metadata.causal is not True:
        raise ValueError(f"causal: {metadata.causal}; allowed: True")
    table = getattr(metadata, "block_table", None)
    if table is None:
        table = metadata.block_table_tensor
    num_seqs = getattr(metadata, "num_reqs", len(metadata.seq_lens))
    starts, lengths = metadata.query_start_loc[: num_seqs + 1], metadata.seq_lens[:num_seqs]
    return Batch(
        block_table=table[:num_seqs],
        query_start=starts,
        query_position=lengths - starts.diff(),
        range_start=torch.zeros_like(lengths),
        range_end=lengths,
        max_range_tokens=int(metadata.max_seq_len),
    )


def write_tokens(
    kv_cache: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    kv_heads: Sequence[int] | None = None,
) -> None:
    """Write new keys and values to their slots.

    Args:
        kv_cache: ``[num_blocks, num_kv_heads, block_size, 2 * head_size]``; is changed.
        key: ``[num_tokens, num_kv_heads, head_size]``, likewise ``value``; those without a slot
            are left out.
        slots: Int64; what is negative goes to slot 0, in vLLM's block for nothing.
        kv_heads: Of the cache and of the tokens, which are written; None: all.
    """
    chosen = slice(None) if kv_heads is None else list(kv_heads)
    num_tokens, size = len(slots), kv_cache.shape[2]
    slots = slots.clamp(min=0)
    blocks, offsets = slots // size, slots % size
    for cache, new in zip(key_value_views(kv_cache, KvLayout.CONTENT), (key, value), strict=True):
        if kv_heads is None:
            cache[blocks, offsets] = new[:num_tokens]
        else:
            where = blocks[:, None], offsets[:, None], torch.tensor(chosen, device=slots.device)
            cache[where] = new[:num_tokens, chosen]


class KernelsAttention:
    """Takes the place of an attention's implementation, which it keeps as ``inner``.

    Args:
        layer: vLLM's attention module, whose ``impl`` this object becomes.
        batches: Of the engine, or of the guest's unit.
        splits_only: Attend with vLLM's own while all heads are here: it keeps its KV as the
            kernels read it.

    Attributes:
        kernels: That attend.

    Raises:
        MigrationError: The attention is more than keys and queries, or the kernels do not take it.
    """

    def __init__(
        self,
        layer: Any,
        name: str,
        kernels: Kernels,
        batches: StepBatches,
        splits_only: bool = False,
    ) -> None:
        check_plain(layer, name)
        self.inner = layer.impl
        self.kernels = kernels
        self._batches = batches
        self._splits_only = splits_only
        self._heads = all_heads(layer.num_heads, layer.num_kv_heads)
        layer.impl = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """As vLLM's: writes the new keys and values."""
        if self._splits_only:
            self.inner.do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
            return
        write_tokens(kv_cache, key, value, slot_mapping)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        **kwargs: Any,
    ) -> torch.Tensor:
        """As vLLM's: fills ``output`` ``[num_tokens, num_heads, head_size]``."""
        if attn_metadata is None:
            return output
        if self._splits_only:
            arguments = layer, query, key, value, kv_cache, attn_metadata
            whole: torch.Tensor = self.inner.forward(*arguments, output=output, **kwargs)
            return whole
        num_tokens = attn_metadata.num_actual_tokens
        output[:num_tokens] = self.attend(query[:num_tokens], kv_cache, attn_metadata, self._heads)
        return output

    def attend(
        self, query: torch.Tensor, kv_cache: torch.Tensor, metadata: Any, heads: Heads
    ) -> torch.Tensor:
        """Attention of some KV heads, ``[num_tokens, query heads, head_size]``.

        BanaServe Eq. 6 to 9 in corrected form, see ``kernels.interface``.
        """
        key, value = key_value_views(kv_cache, KvLayout.CONTENT)
        batch = self._batches.of(metadata)
        scale = self.inner.scale
        return self.kernels.partial_attention(query, key, value, batch, heads, scale).output


def take_kernels(
    kernels: Kernels | None, attentions: Mapping[str, Any], names: Iterable[str]
) -> None:
    """Let an engine's attentions attend with ``kernels``; None: nothing changes.

    On a CPU all of them, for vLLM packs KV otherwise there. Elsewhere only what is split.

    Raises:
        MigrationError: They do not take one of the attentions; nothing has changed.
    """
    chosen = {name: attentions[name] for name in names if kernels is not None}
    for name, layer in chosen.items():
        check_plain(layer, name)
    batches = StepBatches()
    for name, layer in chosen.items():
        assert kernels is not None
        splits_only = layer.kv_cache.device.type != "cpu"
        KernelsAttention(layer, name, kernels, batches, splits_only)


def kernels_of(impl: Any) -> Kernels | None:
    """What an attention's implementation attends with; None: vLLM's own.

    It may be split, and so have another in its place.
    """
    while impl is not None and not isinstance(impl, KernelsAttention):
        impl = vars(impl).get("inner")
    return None if impl is None else impl.kernels


def all_heads(num_heads: int, num_kv_heads: int) -> Heads:
    """Every KV head with the query heads that ask it."""
    return Heads(tuple(range(num_kv_heads)), num_heads // num_kv_heads)


def check_plain(layer: Any, name: str) -> None:
    """Refuse an attention that the kernels would compute otherwise than vLLM.

    Raises:
        MigrationError: With the reason.
    """
    impl = layer.impl
    window = impl.sliding_window
    # vLLM keeps a number or a pair; -1, 0 and None mean that there is none.
    sizes = window if isinstance(window, tuple) else (window or 0,)
    for is_there, what in (
        (max(sizes) > 0, "a sliding window"),
        ((impl.logits_soft_cap or 0) > 0, "a cap of the scores"),
        (getattr(impl, "alibi_slopes", None) is not None, "ALiBi"),
        (getattr(impl, "sinks", None) is not None, "attention sinks"),
    ):
        if is_there:
            raise MigrationError(f"{name} has {what}, which the kernels do not take")
    if str(layer.kv_cache_dtype) != "auto":
        raise MigrationError(
            f"{name} keeps its KV as {layer.kv_cache_dtype}, which the kernels do not take: leave "
            "--kv-cache-dtype at auto"
        )
    if layer.head_size not in HEAD_SIZES or layer.head_size_v != layer.head_size:
        raise MigrationError(
            f"{name} has heads of size {layer.head_size}, which the kernels do not take: they "
            f"take {', '.join(map(str, HEAD_SIZES))}"
        )
    if layer.attn_backend.forward_includes_kv_cache_update:
        raise MigrationError(
            f"{name} writes its KV while it attends ({layer.attn_backend.get_name()}): choose "
            "another --attention-backend"
        )
