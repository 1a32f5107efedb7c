"""Pages of KV caches whose blocks' heads are not contiguous, packed on their device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from banaserve.kernels.interface import BlockCopies, Kernels
from banaserve.kernels.registry import pick

STAGE_BYTES = 16 << 20


class PackedPages:
    """Packed form of a layer's blocks for the store: each block in one run of bytes.

    For vLLM's layouts whose heads are outside of the block (LHBNC, BHLNC). A page is the sequence
    of the block's heads, with each token's key before its value.

    Args:
        layers: ``[num_blocks, num_kv_heads, block_size, 2 * head_size]`` each, of equal strides,
            the last one 1; elements of 1, 2 or 4 bytes.
        kernels: Kernels that copy; None for those of the layers' device.

    Attributes:
        page_bytes: Bytes of one block of one layer.
    """

    def __init__(self, layers: Sequence[torch.Tensor], kernels: Kernels | None = None) -> None:
        first = layers[0]
        self._layers = list(layers)
        self._device = first.device
        self._heads = tuple(range(first.shape[1]))
        self._kernels = kernels or pick(self._device).kernels
        self.page_bytes = first.shape[1:].numel() * first.element_size()

    def stage(self) -> torch.Tensor:
        """Make a buffer for pages on the device: ``[num_pages, page_bytes]`` uint8, some 16 MiB."""
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
            blocks: Ids of blocks, without repeats, no more than ``stage`` has pages.
            heads: Heads to copy; the bytes of other heads keep their values. None for all heads.
        """
        self._kernels.pack_blocks(self._copies(layer, blocks, stage, heads))

    def unpack(
        self,
        layer: int,
        blocks: Sequence[int],
        stage: torch.Tensor,
        heads: Sequence[int] | None = None,
    ) -> None:
        """Copy the first pages of ``stage`` to blocks: the reverse of ``pack``."""
        self._kernels.unpack_blocks(self._copies(layer, blocks, stage, heads))

    def _copies(
        self,
        layer: int,
        blocks: Sequence[int],
        stage: torch.Tensor,
        heads: Sequence[int] | None,
    ) -> BlockCopies:
        # Pinned, since a copy of other memory would wait for all that the stream has to do before.
        ids = torch.tensor(blocks, dtype=torch.int64, pin_memory=self._device.type == "cuda")
        return BlockCopies(
            cache=self._layers[layer],
            block_ids=ids.to(self._device, non_blocking=True),
            kv_heads=self._heads if heads is None else tuple(heads),
            pages=stage[: len(blocks)],
        )


def is_one_run(tensor: torch.Tensor) -> bool:
    """Return whether each ``tensor[i]`` is one run of bytes, in any order of its elements."""
    sizes, strides = tensor.shape[1:], tensor.stride()[1:]
    reach = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    return reach + 1 == sizes.numel()
