"""vLLM's batched copy, for builds of banaserve without CUDA."""

from __future__ import annotations

import torch

from banaserve.engine.vllm import compat
from banaserve.engine.vllm.gpu_copies import QueueCopies
from banaserve.engine.vllm.gpu_pages import Addresses


def copies_of_vllm() -> QueueCopies:
    """Copies on a stream, in one call of vLLM's."""
    swap = compat.batch_copier()

    def copy(
        target: Addresses, source: Addresses, num_bytes: int, stream: int
    ) -> tuple[torch.Tensor, ...]:
        pointers = torch.from_numpy(source), torch.from_numpy(target)
        sizes = torch.full_like(pointers[0], num_bytes)
        with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
            swap(*pointers, sizes)
        return (*pointers, sizes)

    return copy
