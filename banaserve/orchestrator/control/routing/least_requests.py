"""Least requests: each leg goes to the instance with the fewest requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from banaserve.base.types import InstanceView, RequestView
from banaserve.orchestrator.control.measure import STALE_AFTER_S
from banaserve.orchestrator.control.routing.leg_by_leg import LegByLeg
from banaserve.orchestrator.control.routing.legs import LegOptions
from banaserve.orchestrator.control.routing.load import LoadModel
from banaserve.orchestrator.control.routing.option_checks import check_number
from banaserve.orchestrator.control.routing.registry import register


@dataclass(frozen=True, slots=True)
class LeastRequestsOptions:
    """Options of ``least_requests``.

    Attributes:
        stale_after_s: Age of a report, in seconds, above which it is ignored.
    """

    stale_after_s: float = STALE_AFTER_S

    def __post_init__(self) -> None:
        check_number("stale_after_s", self.stale_after_s)


@register("least_requests")
class LeastRequests(LegByLeg):
    """Policy that counts requests, whatever their length; the usual baseline of load balancers.

    The count is the larger of the router's own and that of a fresh report. Among equals, an
    instance with a fresh report comes first, then the one chosen longest ago.
    """

    Options: ClassVar = LeastRequestsOptions

    def __init__(self, options: LeastRequestsOptions, legs: LegOptions, start: int = 0) -> None:
        super().__init__(legs, start)
        self._options = options

    def choose_prefill(
        self, request: RequestView, views: Sequence[InstanceView], now_s: float
    ) -> InstanceView:
        return self.choose_decode(views, now_s)

    def choose_decode(self, views: Sequence[InstanceView], now_s: float) -> InstanceView:
        model = LoadModel.of(views, now_s, stale_after_s=self._options.stale_after_s)

        return min(views, key=lambda view: _rank(view, model))

    def as_good_prefill(
        self,
        request: RequestView,
        chosen: InstanceView,
        views: Sequence[InstanceView],
        now_s: float,
    ) -> Sequence[InstanceView]:
        """Return the instances of the same role with as many requests as ``chosen``."""
        return [one for one in self.as_good_decode(chosen, views, now_s) if one.role is chosen.role]

    def as_good_decode(
        self, chosen: InstanceView, views: Sequence[InstanceView], now_s: float
    ) -> Sequence[InstanceView]:
        """Return the instances with as many requests as ``chosen``."""
        model = LoadModel.of(views, now_s, stale_after_s=self._options.stale_after_s)
        least = _rank(chosen, model)
        return (
            chosen,
            *(one for one in views if one is not chosen and _rank(one, model) == least),
        )


def _rank(view: InstanceView, model: LoadModel) -> tuple[int, bool]:
    return model.present_requests(view), model.report(view) is None
