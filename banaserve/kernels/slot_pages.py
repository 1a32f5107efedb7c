"""Offsets of a KV block's heads in a slot of the store."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch


class PageOrder(StrEnum):
    """What lies next to what in one layer's run of bytes; C is a key and then its value.

    Attributes:
        HNC: Head by head, as vLLM's LBHNC and the CPU.
        NHC: Token by token, as vLLM's LBNHC.
    """

    HNC = "hnc"
    NHC = "nhc"


@dataclass(frozen=True, slots=True)
class SlotPages:
    """The runs of bytes of chosen layers and heads in a slot: layer by layer, part by part.

    The run of layer ``l`` and part ``p`` begins at ``(l * num_parts + p) * page_bytes``.

    Attributes:
        layers: Which layers, in the order of the caches that are copied.
        heads: Which heads of a run, in the order of the heads that are copied.
        num_heads: Of one run.
        block_size_tokens: Tokens of a block.
        head_size: Elements of one key.
        order: Of a run.
        num_parts: Runs of a layer: tensor-parallel ranks.
        part: Which of them.

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
        """Elements of one run: keys and values of all its heads."""
        return self.num_heads * self.block_size_tokens * 2 * self.head_size

    @property
    def strides(self) -> tuple[int, int]:
        """Elements from one token to the next and from one head to the next."""
        content = 2 * self.head_size
        if self.order is PageOrder.HNC:
            return content, self.block_size_tokens * content
        return self.num_heads * content, content

    def first_element(self, layer: int) -> int:
        """Of the run of ``layer``, from the beginning of a slot."""
        return (layer * self.num_parts + self.part) * self.page_elements

    def end_bytes(self, element_bytes: int) -> int:
        """How many bytes of a slot the chosen layers need."""
        last = max(self.layers, default=-1)
        return (last + 1) * self.num_parts * self.page_elements * element_bytes

    def views(
        self, slots: torch.Tensor, layer: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer in all slots, without copying.

        Args:
            slots: ``[num_slots, slot_bytes]`` uint8, whole elements of ``dtype`` in a slot.

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
