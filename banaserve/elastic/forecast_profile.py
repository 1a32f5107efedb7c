"""Profile of device and model that a server forecasts with."""

from __future__ import annotations

from banaserve.config import ServeConfig
from banaserve.costs import profile as profiles
from banaserve.elastic.options import ElasticOptions


def forecast_profile(config: ServeConfig) -> str:
    """Returns its name or file: as given, else that of modelled time, else none.

    Without one the instances say what they are and what their steps take: a profile that nobody
    asked for is of another machine than this one, be it of the same model.

    Raises:
        UserError: There is no such profile, or none and modules are to move, which needs one.
    """
    options = dict(config.orchestrator.options)
    found = str(options.get("profile", next(iter(config.paces), "")))
    if found:
        profiles.load(found)
    ElasticOptions(profile=found, modules=str(options.get("modules", "none")))
    return found
