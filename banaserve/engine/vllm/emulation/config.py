"""Settings of a paced engine, given when it starts."""

from __future__ import annotations

import json
from math import isfinite
from typing import TYPE_CHECKING

import msgspec

from banaserve.engine.vllm.settings.engine_args import section
from banaserve.errors import UserError

if TYPE_CHECKING:
    from banaserve.engine.vllm.compat.config import VllmConfig

KEY = "banaserve_pacing"
MAX_DILATION = 1000.0


class PacingSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options in vLLM's ``additional_config``, as ``banaserve_pacing``.

    Attributes:
        profile: Name or path of the modelled GPU and model.
        devices: The same of instances whose GPU is another one, by their ids.
        folder: Where the steps of each instance are recorded.
        dilation: Wall seconds of one modelled second.
    """

    profile: str
    folder: str
    dilation: float = 1.0
    devices: dict[str, str] = {}


def settings_of(config: VllmConfig) -> PacingSettings | None:
    """The settings of an engine; None where it is not paced.

    Raises:
        UserError: They are malformed.
    """
    settings = section(config, KEY, PacingSettings)
    if settings is None:
        return None
    if not isfinite(settings.dilation) or not 0 < settings.dilation <= MAX_DILATION:
        raise UserError(f"{KEY}: dilation is above 0 and at most {MAX_DILATION:g}")
    return settings


def pacing_options(settings: PacingSettings) -> list[str]:
    """vLLM options of a paced engine; vLLM joins them with other additional options."""
    told = msgspec.to_builtins(settings)
    if not settings.devices:
        del told["devices"]
    return [f"--additional-config.{KEY}", json.dumps(told)]
