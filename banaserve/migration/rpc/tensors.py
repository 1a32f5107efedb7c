"""Tensors of a channel's message: copies between devices and host memory, and packing of values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from banaserve.base.errors import ProtocolError
from banaserve.transport.interface import Tensor
from banaserve.transport.memory import Memory


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values, contiguous in host memory; the same tensor if it is so already.

    A copy from a GPU goes to pinned memory, which avoids the pageable copy that CUDA makes
    otherwise. Waits for the work that the current stream has queued.
    """
    tensor = tensor.detach()
    if tensor.device.type == "cpu":
        return tensor.contiguous()
    can_pin = tensor.device.type == "cuda"
    room = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=can_pin)
    # Blocking: the bytes are sent through a socket, which does not wait for CUDA streams.
    return room.copy_(tensor)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the same values on ``device``; the same tensor if it is there already."""
    if tensor.device == device:
        return tensor
    if device.type != "cuda":
        return tensor.to(device)
    # torch keeps a pinned block from being used again before the copy has ended.
    return tensor.pin_memory().to(device, non_blocking=True)


_PLAIN = (bool, int, float, str, type(None))
_AS_NUMPY = "numpy"
_ON_DEVICE = "device"
_HOST = torch.device("cpu")


class TensorOnGpu(Tensor, frozen=True):
    """A tensor that has arrived in memory of a GPU, so that a message holds no bytes of it."""

    values: Any = None


Pass = Callable[[torch.Tensor], Tensor | None]
"""Function that leaves a tensor where the peer finds it, and returns what tells the peer where;
None if the tensor has to go through host memory."""


class TensorBundle:
    """Tensors of one message, in the order in which they are sent.

    Args:
        beside: Way past the host's memory for some of the tensors; None for none of them.
    """

    def __init__(self, beside: Pass | None = None) -> None:
        self.tensors: list[Tensor] = []
        self._beside = beside

    def put(self, tensor: torch.Tensor) -> int:
        """Add a tensor; return its index."""
        passed = self._beside(tensor) if self._beside is not None else None
        self.tensors.append(to_wire(tensor) if passed is None else passed)
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
    if isinstance(tensor, TensorOnGpu):
        values: torch.Tensor = tensor.values
        return values
    dtype = dtype_named(tensor.dtype)
    if not tensor.data.size:
        return torch.empty(tensor.shape, dtype=dtype)
    return torch.from_numpy(tensor.data).view(dtype).view(tensor.shape)


def bytes_of(memory: Memory, device: torch.device) -> torch.Tensor:
    """Return memory as ``[num_bytes]`` uint8; ``device`` says which GPU it is, if it is one."""
    if memory.is_on_gpu:
        return torch.as_tensor(_GpuBytes(memory), device=device)
    return torch.from_numpy(memory.view())


def memory_of(tensor: torch.Tensor) -> Memory:
    """Return the memory of a contiguous tensor, which it keeps alive."""
    is_on_gpu = tensor.device.type == "cuda"
    return Memory(tensor.data_ptr(), tensor.nbytes, True, tensor, is_on_gpu=is_on_gpu)


class _GpuBytes:
    """Memory of a GPU with the interface by which torch adopts it without a copy."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self.__cuda_array_interface__ = {
            "shape": (memory.num_bytes,),
            "typestr": "|u1",
            "data": (memory.address, False),
            "version": 3,
        }


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
