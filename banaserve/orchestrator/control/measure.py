"""Loads of instances from their reports, and the instances without usable reports.

BanaServe Eq. 32 adds the share of compute and the share of memory in use: U_d = C_d / C_d^max +
M_d / M_d^max, in [0, 2]. A sum calls an instance with full memory and idle compute as loaded as
its opposite (figure 2(b): 0.95 + 0.35 against 0.35 + 0.95), so a load is a vector here, and the sum
is one of three ways to convert it to a number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from operator import attrgetter

from banaserve.base.errors import UserError
from banaserve.base.text.names import check_known
from banaserve.base.types import ClusterView, InstanceId, InstanceReport, InstanceView, Load

STALE_AFTER_S = 2.0
"""Age from which a report is stale, in seconds: a few report periods, since one may be lost."""


class Scalar(StrEnum):
    """Ways to convert a load vector to one number."""

    MAXIMUM = "maximum"
    SUM = "sum"
    WEIGHTED = "weighted"


@dataclass(frozen=True, slots=True)
class ScalarLoad:
    """Conversion of a load to one number: BanaServe Eq. 32 and two other ways.

    Attributes:
        how: Way of conversion: ``maximum`` in [0, 1] (the objective of Eq. 1: an instance is as
            full as its fullest resource), ``sum`` in [0, 2] as published, ``weighted`` in [0, 1].
        compute_weight: Weight of compute in ``weighted``, in [0, 1]; memory has the rest.
    """

    how: str = Scalar.MAXIMUM
    compute_weight: float = 0.5

    def __post_init__(self) -> None:
        check_known("scalar of a load", self.how, list(Scalar))
        if not 0 <= self.compute_weight <= 1:
            raise UserError(f"compute_weight is {self.compute_weight}: give a share in [0, 1]")

    def of(self, load: Load) -> float:
        if self.how == Scalar.SUM:
            return load.compute + load.memory
        if self.how == Scalar.WEIGHTED:
            weight = self.compute_weight
            return weight * load.compute + (1 - weight) * load.memory
        return max(load.compute, load.memory)


def load_of(report: InstanceReport) -> Load:
    """Return the load vector of a report, both shares clipped to [0, 1].

    Compute is busy time multiplied by the fill of a step: an engine with one request decodes all
    the time and is far from loaded. Both factors come from the worker.
    """
    # No min() and max(), for speed: called for thousands of instances at once.
    compute, memory = report.busy_fraction * report.step_fill_fraction, report.kv_used_fraction
    return Load(
        (compute if compute < 1.0 else 1.0) if compute > 0.0 else 0.0,
        (memory if memory < 1.0 else 1.0) if memory > 0.0 else 0.0,
    )


class LeftOut(StrEnum):
    """Reason that an instance is left out of a decision: shown to users, and a metric's label."""

    NOT_READY = "not ready"
    NO_REPORT = "has never reported"
    STALE = "its report is stale"
    NO_FACTS = "cannot take part in migrations"


@dataclass(frozen=True, slots=True)
class Judged:
    """Instances of a cluster view, separated by whether their reports can be used.

    Attributes:
        views: Ready instances with facts and a fresh report, in the order of ids.
        left_out: Reason for each other instance.
    """

    views: tuple[InstanceView, ...]
    left_out: Mapping[InstanceId, LeftOut]


def judge(cluster: ClusterView, stale_after_s: float = STALE_AFTER_S) -> Judged:
    """Return the instances that a migration decision may use, and those that it leaves out.

    A silent instance is neither source nor target: its numbers describe the past. Routing policies
    still see it, since the router has counts of its own.
    """
    usable = []
    left_out = {}
    now_s = cluster.now_s
    for _, view in sorted(cluster.instances.items()):
        # No call for each of thousands of instances.
        if not view.ready:
            left_out[view.id] = LeftOut.NOT_READY
        elif view.facts is None:
            left_out[view.id] = LeftOut.NO_FACTS
        elif view.report is None:
            left_out[view.id] = LeftOut.NO_REPORT
        elif now_s - view.report.at_s > stale_after_s:
            left_out[view.id] = LeftOut.STALE
        else:
            usable.append(view)
    return Judged(tuple(usable), left_out)


SMOOTHING_S = 5.0
"""Smoothing time in seconds: long enough to average out random arrivals, short relative to the
horizon of a migration."""

Reports = Mapping[InstanceId, InstanceReport]


def smoothed(
    cluster: ClusterView, before: Reports, window_s: float = SMOOTHING_S
) -> tuple[ClusterView, Reports]:
    """Return ``cluster`` with smoothed reports, and these reports for the next call.

    Pure: the previous reports are an argument and part of the result. A migration is decided for
    tens of seconds, so only lasting loads matter. Smoothing starts anew for an instance whose role
    or placements have changed, since its earlier reports describe another state.

    Args:
        before: Reports that the last call returned; empty at first.
        window_s: Time constant of the exponential mean, in seconds.
    """
    views = {}
    after = {}
    for name, view in cluster.instances.items():
        views[name] = view
        if view.report is None or not view.ready:
            continue
        old = before.get(name)
        if old is None or (view.changed_s is not None and view.changed_s > old.at_s):
            after[name] = view.report
            continue
        after[name] = blended = _blended(old, view.report, window_s)
        views[name] = _reporting(view, blended)
    return replace(cluster, instances=views), after


def _blended(old: InstanceReport, new: InstanceReport, window_s: float) -> InstanceReport:
    weight = min(1.0, max(0.0, new.at_s - old.at_s) / window_s)
    before, values = _report_values(old), [*_report_values(new)]
    for place in _SMOOTHED:
        values[place] = before[place] + weight * (values[place] - before[place])
    return InstanceReport(*values)


def _reporting(view: InstanceView, report: InstanceReport) -> InstanceView:
    values = [*_view_values(view)]
    values[_REPORT_PLACE] = report
    return InstanceView(*values)


# ``dataclasses.replace`` takes several times as long, and views are copied for every instance.
_report_names = [field.name for field in fields(InstanceReport)]
_view_names = [field.name for field in fields(InstanceView)]
_report_values = attrgetter(*_report_names)
_view_values = attrgetter(*_view_names)
_SMOOTHED = tuple(
    _report_names.index(name)
    for name in ("kv_used_fraction", "busy_fraction", "step_fill_fraction", "step_s")
)
_REPORT_PLACE = _view_names.index("report")
