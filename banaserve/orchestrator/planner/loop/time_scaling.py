"""Options of policies and of the control loop for engines with time dilation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from banaserve.base.plugins.policy_options import option_names, option_types
from banaserve.orchestrator.control.move_policies import registry
from banaserve.orchestrator.planner.loop.loop import ControllerOptions

_LEARNT = ("link_", "hop_")
"""Prefixes of options that are measured on, or given for, the wall clock, and not scaled."""


def dilated(options: ControllerOptions, factor: float) -> ControllerOptions:
    """Return ``options`` for a cluster of which one second takes ``factor`` wall seconds.

    All times in ``options`` are in the cluster's time, so that control has the same frequency,
    smoothing and patience as without dilation.
    """
    limits = options.limits
    return replace(
        options,
        section=stretched(registry.POLICIES.get(options.policy).Options, options.section, factor),
        interval_s=options.interval_s * factor,
        limits=replace(
            limits,
            retry_after_s=limits.retry_after_s * factor,
            smoothing_s=limits.smoothing_s * factor,
            minute_s=limits.minute_s * factor,
        ),
    )


def stretched(options: type[Any], given: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """Return ``given`` with all times of the policy's ``options`` multiplied by ``factor``.

    Args:
        options: Class of the policy's options; options that are not given are scaled from their
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
