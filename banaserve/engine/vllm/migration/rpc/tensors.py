"""Tensors of a channel's message: copies between devices and host memory, and packing of values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from banaserve.errors import ProtocolError
from banaserve.transport.interface import Tensor


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values, contiguous in host memory; the same tensor if it is so already.

    A copy from a GPU goes to pinned memory, which avoids the pageable copy that CUDA makes
    otherwise. Waits for the work that the current stream has queued.
    """
    tensor = tensor.detach()
    if tensor.device.type == "cpu":
        return tensor.contiguous()
    room = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=_can_pin(tensor.device))
    # Blocking: the bytes are sent through a socket, which does not wait for CUDA streams.
    return room.copy_(tensor)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the same values on ``device``; the same tensor if it is there already."""
    if tensor.device == device:
        return tensor
    if not _can_pin(device):
        return tensor.to(device)
    # torch keeps a pinned block from being used again before the copy has ended.
    return tensor.pin_memory().to(device, non_blocking=True)


def _can_pin(device: torch.device) -> bool:
    return device.type == "cuda"


_PLAIN = (bool, int, float, str, type(None))
_AS_NUMPY = "numpy"
_ON_DEVICE = "device"
_HOST = torch.device("cpu")


class TensorBundle:
    """Tensors of one message, in the order in which they are sent."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def put(self, tensor: torch.Tensor) -> int:
        """Add a tensor; return its index."""
        self.tensors.append(to_wire(tensor))
        return len(self.tensors) - 1

    def put_all(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``values`` with each tensor replaced by a list that begins with its index.

        Raises:
            TypeError: A value is neither plain nor a tensor.
        """
        packed: dict[str, Any] = {}
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                mark = [] if value.device.type == "cpu" else [_ON_DEVICE]
                packed[name] = [self.put(value), *mark]
            elif isinstance(value, np.ndarray):
                packed[name] = [self.put(torch.from_numpy(value)), _AS_NUMPY]
            elif isinstance(value, _PLAIN):
                packed[name] = value
            else:
                raise TypeError(f"{name} is a {type(value).__name__}, which cannot travel")
        return packed


def to_wire(tensor: torch.Tensor) -> Tensor:
    """Return the bytes of a tensor; copied only if it is not contiguous or not in host memory."""
    flat = to_host(tensor)
    data = flat.reshape(-1).view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)
    return Tensor(str(flat.dtype).removeprefix("torch."), tuple(flat.shape), data)


def from_wire(tensor: Tensor) -> torch.Tensor:
    """Return a tensor over the received bytes, which it keeps alive.

    Raises:
        ProtocolError: torch has no such dtype.
    """
    dtype = dtype_named(tensor.dtype)
    if not tensor.data.size:
        return torch.empty(tensor.shape, dtype=dtype)
    return torch.from_numpy(tensor.data).view(dtype).view(tensor.shape)


def dtype_named(name: str) -> torch.dtype:
    """Return a dtype by its name without torch's prefix.

    Raises:
        ProtocolError: torch has no such dtype.
    """
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ProtocolError(f"{name!r} is no dtype")
    return found


def restore(
    packed: Mapping[str, Any], tensors: Sequence[Tensor], device: torch.device = _HOST
) -> dict[str, Any]:
    """Restore values that ``TensorBundle.put_all`` has packed.

    Args:
        device: Device for the tensors that were on a device when they were sent.

    Raises:
        ProtocolError: An index has no tensor.
    """
    values: dict[str, Any] = {}
    for name, value in packed.items():
        if not isinstance(value, list | tuple):
            values[name] = value
            continue
        if not value or not isinstance(value[0], int) or not 0 <= value[0] < len(tensors):
            raise ProtocolError(f"{name} names a tensor that did not come")
        tensor = from_wire(tensors[value[0]])
        if _ON_DEVICE in value[1:]:
            tensor = to_device(tensor, device)
        values[name] = tensor.numpy() if _AS_NUMPY in value[1:] else tensor
    return values
