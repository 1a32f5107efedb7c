"""Options of the control loop for engines whose time is stretched."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from banaserve.controller.loop import ControllerOptions
from banaserve.orchestrator.control import ControlLimits
from banaserve.orchestrator.migration import registry

_LEARNT = ("link_", "hop_")
"""What begins so is measured, on the clock on the wall, or said of it."""


def dilated(options: ControllerOptions, factor: float) -> ControllerOptions:
    """Returns ``options`` for a cluster of which one second takes ``factor`` s on the wall.

    Every second in them is one of the cluster's, so that it is controlled as often, as slowly and
    as patiently as without dilation.
    """
    limits = options.limits
    return replace(
        options,
        section=_section(options.policy, dict(options.section), factor),
        interval_s=options.interval_s * factor,
        limits=ControlLimits(
            limits.concurrent,
            limits.per_minute,
            limits.retry_after_s * factor,
            limits.smoothing_s * factor,
            limits.minute_s * factor,
        ),
    )


def _section(policy: str, given: dict[str, Any], factor: float) -> dict[str, Any]:
    section = dict(given)
    for key, value in {**registry.defaults(policy), **given}.items():
        if key.startswith(_LEARNT) or not isinstance(value, int | float):
            continue
        if not key.endswith("_s"):
            continue
        scaled = value / factor if key.endswith("_per_s") else value * factor
        section[key] = round(scaled) if registry.is_whole(policy, key) else scaled
    return section
