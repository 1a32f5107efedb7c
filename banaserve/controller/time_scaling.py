"""Options of policies and of the control loop for engines whose time is stretched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from banaserve.controller.loop import ControllerOptions
from banaserve.orchestrator.control import ControlLimits
from banaserve.orchestrator.migration import registry
from banaserve.registry import option_names, option_types

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
        section=stretched(registry.POLICIES.get(options.policy).Options, options.section, factor),
        interval_s=options.interval_s * factor,
        limits=ControlLimits(
            limits.concurrent,
            limits.per_minute,
            limits.retry_after_s * factor,
            limits.smoothing_s * factor,
            limits.minute_s * factor,
        ),
    )


def stretched(options: type[Any], given: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """Returns ``given`` with every second that the policy of these ``options`` counts stretched.

    Args:
        options: A policy's class of options; those that are not given are stretched from their
            defaults.
    """
    section = dict(given)
    if factor == 1:
        return section
    types, usual = option_types(options), options()
    defaults = {name: getattr(usual, name) for name in option_names(usual)}
    for key, value in {**defaults, **given}.items():
        if key.startswith(_LEARNT) or not isinstance(value, int | float):
            continue
        if not key.endswith("_s"):
            continue
        scaled = value / factor if key.endswith("_per_s") else value * factor
        takes = types.get(key, ())
        section[key] = round(scaled) if int in takes and float not in takes else scaled
    return section
