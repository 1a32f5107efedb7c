"""``banaserve::pack_blocks`` and ``banaserve::unpack_blocks``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.library import CustomOpDef

from banaserve.kernels.tiling import next_power_of_2
from banaserve.kernels.triton.launch import check_device, index_tensor, on_device
from banaserve.kernels.triton.pack import copy_pages

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
_TILE_ELEMENTS = 4096


def _operator(name: str, into_pages: bool) -> CustomOpDef:
    """Make an operator over the fields of ``BlockCopies``, which the caller has checked."""
    cache, pages = ("Tensor", "Tensor(a!)") if into_pages else ("Tensor(a!)", "Tensor")

    def copy(
        cache: torch.Tensor, block_ids: torch.Tensor, kv_heads: Sequence[int], pages: torch.Tensor
    ) -> None:
        check_device("cache", cache)
        if block_ids.numel():
            _launch(cache, block_ids, kv_heads, pages, into_pages)

    operator = torch.library.custom_op(
        f"banaserve::{name}",
        copy,
        mutates_args=("pages",) if into_pages else ("cache",),
        schema=f"({cache} cache, Tensor block_ids, int[] kv_heads, {pages} pages) -> ()",
    )
    operator.register_fake(lambda *arguments: None)
    return operator


pack_blocks = _operator("pack_blocks", into_pages=True)
unpack_blocks = _operator("unpack_blocks", into_pages=False)


def _launch(
    cache: torch.Tensor,
    block_ids: torch.Tensor,
    kv_heads: Sequence[int],
    pages: torch.Tensor,
    into_pages: bool,
) -> None:
    bits = _BITS[cache.element_size()]
    blocks, packed = cache.view(bits), pages.view(bits)
    _, _, block_size, content_size = blocks.shape
    padded = next_power_of_2(content_size)
    with on_device(cache):
        copy_pages[(len(block_ids) * len(kv_heads),)](
            blocks,
            block_ids,
            index_tensor(tuple(kv_heads), cache.device),
            packed,
            len(kv_heads),
            *blocks.stride()[:3],
            packed.stride(0),
            BLOCK_SIZE=block_size,
            CONTENT_SIZE=content_size,
            CONTENT_PADDED=padded,
            TILE_TOKENS=min(next_power_of_2(block_size), max(1, _TILE_ELEMENTS // padded)),
            INTO_PAGES=into_pages,
        )
