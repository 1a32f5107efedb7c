"""A guest's part of attention over sequences whose older blocks it holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from banaserve.engine.vllm.migration.kv_pages import Pages
from banaserve.errors import ProtocolError
from banaserve.kernels.interface import Batch, Part


class OlderBlocks:
    """KV of some layers that is read and never written by a step.

    Args:
        kv_caches: ``[num_blocks, num_kv_heads, block_size, 2 * head_size]`` by attention.
        scales: Of the scores, by attention.
    """

    def __init__(
        self,
        pages: Pages,
        kv_caches: Mapping[str, torch.Tensor],
        scales: Mapping[str, float],
    ) -> None:
        self._pages = pages
        self._kv_caches = dict(kv_caches)
        self._scales = dict(scales)
        self._step: tuple[int, Batch] | None = None

    def describe(self, step_id: int, fields: Mapping[str, Any]) -> None:
        """Take what the layers of a step have in common.

        Raises:
            ProtocolError: It is no step, or names blocks that are not here.
        """
        try:
            table, lengths = fields["block_table"], fields["num_tokens"]
            batch = Batch(
                block_table=table,
                query_start=fields["query_start"],
                query_position=lengths,
                range_start=torch.zeros_like(lengths),
                range_end=lengths,
            )
        except (KeyError, AttributeError, TypeError) as error:
            raise ProtocolError(f"step {step_id} is no step over older blocks: {error}") from None
        num_blocks, _, block_size, _ = next(iter(self._kv_caches.values())).shape
        room = table.shape[-1] * block_size
        if not table.numel() or not 0 <= int(table.min()) <= int(table.max()) < num_blocks:
            raise ProtocolError(f"step {step_id} names blocks that are not here")
        if len(lengths) != len(table) or int(lengths.max()) > room:
            raise ProtocolError(f"step {step_id} has more tokens than blocks")
        self._step = step_id, batch

    def run(self, name: str, step_id: int, query: torch.Tensor) -> Part:
        """Attention over the step's blocks, float32.

        Raises:
            ProtocolError: The step has not been described.
        """
        if self._step is None or self._step[0] != step_id:
            raise ProtocolError(f"step {step_id} has not been described")
        with torch.inference_mode():
            return self._pages.attend(
                query,
                self._kv_caches[name],
                self._step[1],
                self._scales[name],
                causal=False,
            )
