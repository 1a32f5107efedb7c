"""Processor of logits that ends its engine for one request: what the request says in vllm_xargs."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any

import torch
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

DIES_AT = "dies_at"
"""Its engine dies before it computes the token with this number, counted from 0."""


class Poison(LogitsProcessor):
    """Kills its process where a request has the number of tokens that it names."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, tuple[Sequence[int], int]] = {}

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is not None:
            self._follow(batch_update)
        if any(len(tokens) >= number for tokens, number in self._rows.values()):
            os.kill(os.getpid(), signal.SIGKILL)

    def _follow(self, batch_update: BatchUpdate) -> None:
        for row in batch_update.removed:
            self._rows.pop(row, None)
        for row, params, _, tokens in batch_update.added:
            self._rows.pop(row, None)
            if (number := (params.extra_args or {}).get(DIES_AT)) is not None:
                self._rows[row] = (tokens, number)
        for one, other, direction in batch_update.moved:
            first, second = self._rows.pop(one, None), self._rows.pop(other, None)
            if first is not None:
                self._rows[other] = first
            if second is not None and direction is MoveDirectionality.SWAP:
                self._rows[one] = second
