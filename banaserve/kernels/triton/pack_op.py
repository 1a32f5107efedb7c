"""``banaserve::pack_blocks`` and ``banaserve::unpack_blocks``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.library import CustomOpDef

from banaserve.kernels.interface import BlockCopies
from banaserve.kernels.layouts import KvLayout, key_value_views
from banaserve.kernels.slot_pages import PageOrder, SlotPages
from banaserve.kernels.tiling import next_power_of_2
from banaserve.kernels.triton.launch import check_device, index_tensor, on_device
from banaserve.kernels.triton.pack import copy_pages

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
_TILE_ELEMENTS = 2048
# The fields of ``SlotPages``, in their order.
_PAGES = (
    "int[] layers, int[] heads, int num_heads, int block_size_tokens, int head_size, str order, "
    "int num_parts, int part"
)


def _operator(name: str, into_slots: bool) -> CustomOpDef:
    """Make an operator over ``operator_arguments``, which the caller has checked."""
    caches, slots = ("Tensor[]", "Tensor(a!)") if into_slots else ("Tensor(a!)[]", "Tensor")

    def copy(
        caches: Sequence[torch.Tensor],
        layout: str,
        block_ids: torch.Tensor,
        kv_heads: Sequence[int],
        slots: torch.Tensor,
        slot_ids: torch.Tensor,
        *fields: Any,
    ) -> None:
        pages = _pages(*fields)
        chosen = BlockCopies(caches, KvLayout(layout), block_ids, kv_heads, slots, slot_ids, pages)
        _copy(chosen, into_slots)

    operator = torch.library.custom_op(
        f"banaserve::{name}",
        copy,
        mutates_args=("slots",) if into_slots else ("caches",),
        schema=(
            f"({caches} caches, str layout, Tensor block_ids, int[] kv_heads, {slots} slots, "
            f"Tensor slot_ids, {_PAGES}) -> ()"
        ),
    )
    operator.register_fake(lambda *arguments: None)
    return operator


pack_blocks = _operator("pack_blocks", into_slots=True)
unpack_blocks = _operator("unpack_blocks", into_slots=False)


def operator_arguments(copies: BlockCopies) -> tuple[Any, ...]:
    """Return ``copies`` as arguments of both operators, in types that a schema can hold."""
    caches, layout, block_ids, kv_heads, slots, slot_ids, pages = copies
    return (
        list(caches),
        layout.value,
        block_ids,
        list(kv_heads),
        slots,
        slot_ids,
        pages.layers,
        pages.heads,
        pages.num_heads,
        pages.block_size_tokens,
        pages.head_size,
        pages.order.value,
        pages.num_parts,
        pages.part,
    )


def _pages(
    layers: Sequence[int], heads: Sequence[int], num_heads: int, block_size_tokens: int,
    head_size: int, order: str, num_parts: int, part: int,
) -> SlotPages:  # fmt: skip
    return SlotPages(
        tuple(layers), tuple(heads), num_heads, block_size_tokens, head_size, PageOrder(order),
        num_parts, part,
    )  # fmt: skip


def _copy(copies: BlockCopies, into_slots: bool) -> None:
    caches, layout, block_ids, kv_heads, slots, slot_ids, pages = copies
    check_device("caches", caches[0])
    num_programs = block_ids.numel() * len(caches) * len(kv_heads)
    if not num_programs:
        return
    bits = _BITS[caches[0].element_size()]
    key, value = key_value_views(caches[0].view(bits), layout)
    typed, device = slots.view(bits), slots.device
    # Layers may be separate allocations: they are addressed by their distance from the first.
    in_caches = tuple(
        (cache.data_ptr() - caches[0].data_ptr()) // key.element_size() for cache in caches
    )
    in_slots = tuple(pages.first_element(layer) for layer in pages.layers)
    head_padded = next_power_of_2(pages.head_size)
    tokens = min(next_power_of_2(pages.block_size_tokens), max(1, _TILE_ELEMENTS // head_padded))
    with on_device(slots):
        copy_pages[(num_programs,)](
            key,
            index_tensor(in_caches, device, torch.int64),
            block_ids,
            index_tensor(tuple(kv_heads), device),
            typed,
            index_tensor(in_slots, device, torch.int64),
            slot_ids,
            index_tensor(pages.heads, device),
            len(caches),
            len(kv_heads),
            *key.stride()[:3],
            value.storage_offset() - key.storage_offset(),
            typed.stride(0),
            *pages.strides,
            BLOCK_SIZE=pages.block_size_tokens,
            HEAD_SIZE=pages.head_size,
            HEAD_PADDED=head_padded,
            TILE_TOKENS=tokens,
            OFFSETS_DIVIDE_BY=math.gcd(16, *in_caches, *in_slots),
            INTO_SLOTS=into_slots,
        )
