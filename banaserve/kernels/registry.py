"""Choice of the kernels for a device, with its reason."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable
from typing import NamedTuple

import torch

from banaserve.base.errors import UserError
from banaserve.base.text.names import check_known
from banaserve.kernels.interface import Kernels

_MODULES = {
    "triton": ("banaserve.kernels.triton.kernels", "TritonKernels"),
    "flashinfer": ("banaserve.kernels.flashinfer_kernels", "FlashInferKernels"),
    "reference": ("banaserve.kernels.reference", "ReferenceKernels"),
}
CHOICES = ("auto", *_MODULES)
_log = logging.getLogger(__name__)


class Picked(NamedTuple):
    """Kernels that ``pick`` chose.

    Attributes:
        reason: Reason of the choice in one line, for a log or a report.
    """

    kernels: Kernels
    reason: str


def pick(device: torch.device, choice: str = "auto") -> Picked:
    """Return the kernels for tensors on ``device``; log once which they are.

    ``auto`` takes Triton on a GPU and the reference elsewhere. FlashInfer has to be requested: it
    supports fewer head sizes, dtypes and ranges, and plans on the host.

    Raises:
        UserError: The choice is unknown or cannot run here; there is no fallback.
    """
    # Only the type matters, so that cuda:0 and cuda:1 share what has been compiled.
    return _pick(device.type, choice)


@functools.lru_cache(maxsize=16)
def _pick(device_type: str, choice: str) -> Picked:
    check_known("kernels", choice, CHOICES)
    name, reason = choice, "asked for"
    if choice == "auto":
        lacks = missing("triton", device_type)
        name = "reference" if lacks else "triton"
        reason = lacks or f"runs on {device_type} and takes every case"
    elif lacks := missing(choice, device_type):
        raise UserError(f"the {choice} kernels cannot run: {lacks}; choose auto")
    kernels = _make(name)
    _log.info("kernels for %s: %s (%s)", device_type, name, reason)
    return Picked(kernels, reason)


def _make(name: str) -> Kernels:
    module, kind = _MODULES[name]
    make: Callable[..., Kernels] = getattr(importlib.import_module(module), kind)
    # In place of other kernels it is as exact as they are; float64 is for comparisons with them.
    return make(compute_dtype=torch.float32) if name == "reference" else make()


def missing(name: str, device_type: str) -> str | None:
    """Return in a few words why kernels cannot run on a type of device; None if they can."""
    if name == "reference":
        return None
    for package in ("triton",) if name == "triton" else ("triton", "flashinfer"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
    if device_type == "cuda":
        return None
    if (
        name == "triton"
        and importlib.import_module("banaserve.kernels.triton.launch").IS_INTERPRETED
    ):
        return None
    return f"{name} does not run on {device_type}"
