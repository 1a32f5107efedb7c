"""Profile of device and model that a server forecasts with."""

from __future__ import annotations

from banaserve import models
from banaserve.config import ServeConfig
from banaserve.costs import profile as profiles
from banaserve.errors import UserError

_PACKAGED_PROFILE = "smollm2-135m-cpu"


def forecast_profile(config: ServeConfig, on_cpu: bool) -> str:
    """Returns its name or file: as given, else that of modelled time, else the packaged model's.

    Args:
        on_cpu: Whether the engines compute on one.

    Raises:
        UserError: None of these is of the model and the device that serve, so that every forecast
            would be of others; or there is no such profile.
    """
    found = dict(config.orchestrator.options).get("profile", config.pace or None)
    if found is None:
        if config.model != models.PACKAGED or not on_cpu:
            device = "a CPU" if on_cpu else "this device"
            raise UserError(
                f"the elastic policy has no step times of {config.model} on {device} to forecast "
                f"with: give --orchestrator-option profile=NAME ({', '.join(profiles.names())}, or "
                "a .toml file), or --pace"
            )
        found = _PACKAGED_PROFILE
    profiles.load(str(found))
    return str(found)
