"""Round robin: each leg goes to the instance that was chosen longest ago."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from banaserve.base.types import InstanceView, RequestView
from banaserve.orchestrator.control.routing.leg_by_leg import LegByLeg
from banaserve.orchestrator.control.routing.legs import LegOptions
from banaserve.orchestrator.control.routing.registry import register


@dataclass(frozen=True, slots=True)
class RoundRobinOptions:
    """``round_robin`` has no options."""


@register("round_robin")
class RoundRobin(LegByLeg):
    """Policy that takes the instances in turn and ignores load; the simplest baseline."""

    Options: ClassVar = RoundRobinOptions

    def __init__(self, options: RoundRobinOptions, legs: LegOptions, start: int = 0) -> None:
        super().__init__(legs, start)

    def choose_prefill(
        self, request: RequestView, views: Sequence[InstanceView], now_s: float
    ) -> InstanceView:
        return views[0]

    def choose_decode(self, views: Sequence[InstanceView], now_s: float) -> InstanceView:
        return views[0]
