"""Choice of the attention of an engine and its guests: vLLM's, or the kernels of the device."""

from __future__ import annotations

import torch

from banaserve.base.errors import MigrationError, UserError
from banaserve.engine.migration_settings import ATTENTION_KERNELS
from banaserve.kernels import registry
from banaserve.kernels.interface import Kernels


def kernels_for(choice: str, device: torch.device) -> Kernels | None:
    """Return the kernels that compute attention on ``device``; None: vLLM's own attention.

    ``auto`` is vLLM's attention on a CPU, which is several times faster than our reference, and
    our kernels everywhere else: vLLM's on a GPU cannot attend with only some heads of a layer's KV.

    Raises:
        MigrationError: The choice cannot run on the device.
    """
    on_cpu = device.type == "cpu"
    if choice == "vllm" and not on_cpu:
        raise MigrationError(
            f"vLLM's attention cannot be split on {device.type}: leave --migration-attention at "
            "auto"
        )
    if choice not in ATTENTION_KERNELS and on_cpu:
        return None
    try:
        return registry.pick(device, choice if choice in registry.CHOICES else "auto").kernels
    except UserError as refused:
        raise MigrationError(str(refused)) from None


def attention_blocker(choice: str, device_type: str) -> str:
    """Return why kernels that the user named cannot run on a type of device; empty if they can."""
    lacks = registry.missing(choice, device_type) if choice in registry.CHOICES[1:] else None
    return f"--migration-attention {choice}: {lacks}; choose auto" if lacks else ""
