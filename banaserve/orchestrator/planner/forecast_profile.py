"""Profile of device and model that a server makes its forecasts with."""

from __future__ import annotations

from banaserve.base.config import ServeConfig
from banaserve.orchestrator.control.costs import profile as profiles
from banaserve.orchestrator.planner.options import ElasticOptions


def forecast_profile(config: ServeConfig) -> str:
    """Return the profile's name or file: as given, else the first one of ``--pace``, else empty.

    Without a profile, the instances report their shape and learnt step times: a default profile
    would describe another machine than this one, even if it were of the same model.

    Raises:
        UserError: The profile does not exist, or none is given though modules may move, which
            requires one.
    """
    options = dict(config.orchestrator.options)
    found = str(options.get("profile", next(iter(config.paces), "")))
    if found:
        profiles.load(found)
    ElasticOptions(profile=found, modules=str(options.get("modules", "none")))
    return found
