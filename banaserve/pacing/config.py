"""Settings of a paced engine, given when it starts."""

from __future__ import annotations

import json
from math import isfinite
from typing import TYPE_CHECKING

import msgspec

from banaserve.base.errors import UserError
from banaserve.engine.engine_args import section

if TYPE_CHECKING:
    from banaserve.engine.compat.config import VllmConfig

KEY = "banaserve_pacing"
MAX_DILATION = 1000.0


class PacingSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options in vLLM's ``additional_config``, as ``banaserve_pacing``.

    Attributes:
        profile: Name or path of the profile of the modelled GPU and model.
        devices: Names or paths of the profiles of instances with another GPU, by instance id.
        folder: Folder in which the steps of each instance are recorded.
        dilation: Wall seconds of one modelled second.
    """

    profile: str
    folder: str
    dilation: float = 1.0
    devices: dict[str, str] = {}


def settings_of(config: VllmConfig) -> PacingSettings | None:
    """Return the settings of an engine; None if it is not paced.

    Raises:
        UserError: The settings are malformed.
    """
    settings = section(config, KEY, PacingSettings)
    if settings is None:
        return None
    if not isfinite(settings.dilation) or not 0 < settings.dilation <= MAX_DILATION:
        raise UserError(f"{KEY}: dilation is above 0 and at most {MAX_DILATION:g}")
    return settings


def pacing_options(settings: PacingSettings) -> list[str]:
    """Return vLLM's options of a paced engine, which vLLM merges with other additional options."""
    told = msgspec.to_builtins(settings)
    if not settings.devices:
        del told["devices"]
    return [f"--additional-config.{KEY}", json.dumps(told)]
