"""Offsets of a KV block's heads in a slot of the store."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch


class PageOrder(StrEnum):
    """Order of the elements in one layer's run of bytes; C is a key followed by its value.

    Attributes:
        HNC: Order head by head, as in vLLM's LBHNC and on CPUs.
        NHC: Order token by token, as in vLLM's LBNHC.
    """

    HNC = "hnc"
    NHC = "nhc"


@dataclass(frozen=True, slots=True)
class SlotPages:
    """Runs of bytes of chosen layers and heads in a slot: layer by layer, part by part.

    The run of layer ``l`` and part ``p`` begins at ``(l * num_parts + p) * page_bytes``.

    Attributes:
        layers: Chosen layers, in the order of the caches that are copied.
        heads: Chosen heads of a run, in the order of the heads that are copied.
        num_heads: Number of heads of one run.
        block_size_tokens: Tokens per block.
        head_size: Number of elements of one key.
        order: Order of the elements in a run.
        num_parts: Number of runs per layer: one for each tensor-parallel rank.
        part: Index of the chosen run of each layer.

    Raises:
        ValueError: A field is out of range; the text names it.
    """

    layers: tuple[int, ...]
    heads: tuple[int, ...]
    num_heads: int
    block_size_tokens: int
    head_size: int
    order: PageOrder = PageOrder.HNC
    num_parts: int = 1
    part: int = 0

    def __post_init__(self) -> None:
        for name in ("num_heads", "block_size_tokens", "head_size", "num_parts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)}; allowed: at least 1")
        if not 0 <= self.part < self.num_parts:
            raise ValueError(f"part: {self.part}; allowed: 0 to {self.num_parts - 1}")
        if min(self.layers, default=0) < 0 or len(set(self.layers)) != len(self.layers):
            raise ValueError(f"layers: {self.layers}; allowed: each once, from 0 on")
        if len(set(self.heads)) != len(self.heads) or not set(self.heads) <= set(
            range(self.num_heads)
        ):
            raise ValueError(f"heads: {self.heads}; allowed: each once, below {self.num_heads}")

    @property
    def page_elements(self) -> int:
        """Number of elements of one run: keys and values of all its heads."""
        return self.num_heads * self.block_size_tokens * 2 * self.head_size

    @property
    def strides(self) -> tuple[int, int]:
        """Number of elements from one token to the next, and from one head to the next."""
        content = 2 * self.head_size
        if self.order is PageOrder.HNC:
            return content, self.block_size_tokens * content
        return self.num_heads * content, content

    def first_element(self, layer: int) -> int:
        """Return the index of the first element of the run of ``layer``, from a slot's begin."""
        return (layer * self.num_parts + self.part) * self.page_elements

    def end_bytes(self, element_bytes: int) -> int:
        """Return the number of bytes of a slot up to the end of the last chosen layer."""
        last = max(self.layers, default=-1)
        return (last + 1) * self.num_parts * self.page_elements * element_bytes

    def views(
        self, slots: torch.Tensor, layer: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of the keys and the values of one layer in all slots, without copying.

        Args:
            slots: ``[num_slots, slot_bytes]`` uint8; a slot holds whole elements of ``dtype``.

        Returns:
            Two views ``[num_slots, block_size, num_heads, head_size]`` of ``dtype``.
        """
        typed = slots.view(dtype)
        by_token, by_head = self.strides
        shape = (slots.shape[0], self.block_size_tokens, self.num_heads, self.head_size)
        strides = (typed.stride(0), by_token, by_head, 1)
        first = typed.storage_offset() + self.first_element(layer)
        key = typed.as_strided(shape, strides, first)
        return key, typed.as_strided(shape, strides, first + self.head_size)
