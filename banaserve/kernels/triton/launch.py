"""Launch of Triton kernels: device guard and compiled variants."""

from __future__ import annotations

import contextlib
import functools
import threading

import torch
import triton
import triton.language as tl


@triton.jit
def _probe(nothing):
    tl.store(nothing, 0)


# TRITON_INTERPRET decides, when a kernel is defined, whether it runs in Triton's interpreter.
IS_INTERPRETED = type(_probe).__name__ == "InterpretedFunction"


def check_device(name: str, tensor: torch.Tensor) -> None:
    """Check that the kernels can run on the tensor's device.

    Raises:
        ValueError: The tensor is not on a GPU, and Triton's interpreter is off.
    """
    if tensor.device.type == "cuda" or IS_INTERPRETED:
        return
    raise ValueError(f"{name}: on {tensor.device}; allowed: cuda, or TRITON_INTERPRET=1 for tests")


_INTERPRETER = threading.RLock()
"""Lock of Triton's interpreter, which has one grid for all threads of the process."""


def on_device(tensor: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """Return a context in which kernels are launched on the tensor's GPU, from any thread."""
    if IS_INTERPRETED:
        return _INTERPRETER
    if tensor.device.type == "cuda":
        return torch.cuda.device(tensor.device)
    return contextlib.nullcontext()


@functools.lru_cache(maxsize=4096)
def index_tensor(values: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return ``values`` as an int32 tensor on the device.

    The tensor is cached: a copy for each call would cost more than the kernel. The first call for
    some values copies from the host, which no graph can capture: run an operation once before it is
    captured.
    """
    return torch.tensor(values, dtype=torch.int32, device=device)
