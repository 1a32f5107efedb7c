"""Where a guest computes, and what it attends with."""

from __future__ import annotations

import torch
from vllm.config import VllmConfig

from banaserve.engine.vllm.migration.attention_door import kernels_for
from banaserve.engine.vllm.migration.settings import MigrationSettings, settings_of
from banaserve.kernels.interface import Kernels


def device_of(config: VllmConfig) -> torch.device:
    """Of weights and KV: the first that this process sees of the kind that the engine runs on."""
    kind = str(config.device_config.device_type)
    return torch.device(kind, 0) if kind != "cpu" else torch.device("cpu")


def attends_with(config: VllmConfig) -> Kernels | None:
    """The kernels that a guest attends with, as its host does; None: vLLM's own.

    Raises:
        MigrationError: What was chosen cannot run here.
    """
    settings = settings_of(config) or MigrationSettings()
    return kernels_for(settings.attention, device_of(config))
