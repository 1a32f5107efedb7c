"""Pages of KV caches that keep a block's heads apart, packed on their device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from banaserve.kernels.interface import BlockCopies, Kernels
from banaserve.kernels.layouts import KvLayout, key_value_views
from banaserve.kernels.registry import pick
from banaserve.kernels.slot_pages import SlotPages

STAGE_BYTES = 16 << 20


class PackedPages:
    """Reads and writes blocks of one layer as the store wants them: each in one run of bytes.

    For vLLM's layouts whose heads lie outside of the block (LHBNC, BHLNC). A page is the block's
    heads one after the other, each token's key before its value.

    Args:
        layers: ``[num_blocks, num_kv_heads, block_size, 2 * head_size]`` each, of equal strides,
            the last one 1; elements of 1, 2 or 4 bytes.
        kernels: None picks those of the layers' device.

    Attributes:
        page_bytes: Of one block of one layer.

    Raises:
        ValueError: The layers have not that shape.
    """

    def __init__(self, layers: Sequence[torch.Tensor], kernels: Kernels | None = None) -> None:
        first = layers[0]
        key, _ = key_value_views(first, KvLayout.CONTENT)
        _, block_size, num_heads, head_size = key.shape
        self._layers = list(layers)
        self._device = first.device
        self._heads = tuple(range(num_heads))
        self._pages = SlotPages((0,), self._heads, num_heads, block_size, head_size)
        self._kernels = kernels or pick(self._device).kernels
        self.page_bytes = self._pages.end_bytes(first.element_size())

    def stage(self) -> torch.Tensor:
        """Room for pages on the device, ``[num_pages, page_bytes]`` uint8, about 16 MiB."""
        num_pages = max(1, STAGE_BYTES // self.page_bytes)
        return torch.empty((num_pages, self.page_bytes), dtype=torch.uint8, device=self._device)

    def pack(
        self,
        layer: int,
        blocks: Sequence[int],
        stage: torch.Tensor,
        heads: Sequence[int] | None = None,
    ) -> None:
        """Copy blocks to the first pages of ``stage``, on the current stream.

        Args:
            blocks: Without repeats, no more than ``stage`` has pages.
            heads: Which; the bytes of others keep their values. None: all.
        """
        self._kernels.pack_blocks(self._copies(layer, blocks, stage, heads))

    def unpack(
        self,
        layer: int,
        blocks: Sequence[int],
        stage: torch.Tensor,
        heads: Sequence[int] | None = None,
    ) -> None:
        """Copy the first pages of ``stage`` to blocks: ``pack`` the other way."""
        self._kernels.unpack_blocks(self._copies(layer, blocks, stage, heads))

    def _copies(
        self,
        layer: int,
        blocks: Sequence[int],
        stage: torch.Tensor,
        heads: Sequence[int] | None,
    ) -> BlockCopies:
        chosen = self._heads if heads is None else tuple(heads)
        return BlockCopies(
            caches=[self._layers[layer]],
            layout=KvLayout.CONTENT,
            block_ids=torch.tensor(blocks, dtype=torch.int64, device=self._device),
            kv_heads=chosen,
            slots=stage,
            slot_ids=torch.arange(len(blocks), dtype=torch.int64, device=self._device),
            pages=self._pages if heads is None else replace(self._pages, heads=chosen),
        )


def is_one_run(tensor: torch.Tensor) -> bool:
    """Whether each ``tensor[i]`` lies in one run of bytes, in whatever order."""
    sizes, strides = tensor.shape[1:], tensor.stride()[1:]
    reach = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    return reach + 1 == sizes.numel()
