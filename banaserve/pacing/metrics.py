"""Metrics of a server whose time is modelled: its profile, and how well its machine keeps time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import REGISTRY, Collector

from banaserve.orchestrator.control.costs.profile import Profile, error_words
from banaserve.pacing.step_log import readers

_SUMS = {
    "num_steps": ("banaserve_paced_steps", "Steps that were given their modelled time"),
    "num_overrun": (
        "banaserve_paced_steps_overrun",
        "Steps whose real work took longer than their modelled time: where these are more than a "
        "few, times say nothing of the modelled GPU",
    ),
    "modelled_s": (
        "banaserve_paced_modelled_seconds",
        "Modelled time of all steps, in wall seconds",
    ),
    "late_s": (
        "banaserve_paced_late_seconds",
        "How long after their modelled time steps ended, in wall seconds",
    ),
}


class PacedTime(Collector):
    """Metrics of modelled time: the profile, the dilation, and how well the steps kept time."""

    def __init__(self, profile: Profile, dilation: float, folder: Path) -> None:
        self._profile = profile
        self._dilation = dilation
        self._folder = folder

    def collect(self) -> Iterator[Metric]:
        about = GaugeMetricFamily(
            "banaserve_paced_info",
            "1: all times are those of a modelled GPU and model",
            labels=["profile", "source", "step_error"],
        )
        of_steps = error_words(self._profile.error)
        about.add_metric([self._profile.name, self._profile.source, of_steps], 1)
        yield about
        yield GaugeMetricFamily(
            "banaserve_paced_dilation", "Wall seconds of one modelled second", self._dilation
        )
        sums = [(log.instance_id, log.sums()) for log in readers(self._folder)]
        for field, (name, help_text) in _SUMS.items():
            family = CounterMetricFamily(name, help_text, labels=["instance_id"])
            for instance_id, found in sums:
                family.add_metric([instance_id], getattr(found, field))
            yield family


def register(profile: Profile, dilation: float, folder: Path) -> None:
    """Add the metrics of modelled time to this process's metrics."""
    REGISTRY.register(PacedTime(profile, dilation, folder))
