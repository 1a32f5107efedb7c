"""Tensors of a step on their way between a device and the host memory that messages are made of."""

from __future__ import annotations

import torch


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in host memory, contiguous; the same tensor where it is so already.

    From a GPU through pinned memory, past the pageable copy that CUDA makes otherwise. Waits for
    what the current stream has queued.
    """
    tensor = tensor.detach()
    if tensor.device.type == "cpu":
        return tensor.contiguous()
    room = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=_can_pin(tensor.device))
    # Blocking: the bytes leave through a socket, which knows no streams.
    return room.copy_(tensor)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same values on ``device``; the same tensor where it is there already."""
    if tensor.device == device:
        return tensor
    if not _can_pin(device):
        return tensor.to(device)
    # torch keeps a pinned block from being used again before the copy has ended.
    return tensor.pin_memory().to(device, non_blocking=True)


def _can_pin(device: torch.device) -> bool:
    return device.type == "cuda"
