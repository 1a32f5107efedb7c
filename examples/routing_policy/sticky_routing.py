"""Routing that stays with one instance until it is clearly busier than another.

A policy of a package of its own: banaserve finds it by the entry point in ``pyproject.toml``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from banaserve.base.errors import UserError
from banaserve.base.types import InstanceId, InstanceView, RequestView
from banaserve.orchestrator.control.routing.leg_by_leg import LegByLeg
from banaserve.orchestrator.control.routing.legs import LegOptions


@dataclass(frozen=True, slots=True)
class StickyOptions:
    """Options of ``sticky``: ``--routing-option max_lead_requests=4``.

    Attributes:
        max_lead_requests: The instance in use may have so many requests more than the idlest one.
    """

    max_lead_requests: int = 2

    def __post_init__(self) -> None:
        if self.max_lead_requests < 0:
            raise UserError(f"max_lead_requests is {self.max_lead_requests}: give 0 or more")


class Sticky(LegByLeg):
    """Sends legs where the last ones went, while the others are hardly idler.

    ``LegByLeg`` splits requests into legs and finds who may serve each; a policy only chooses. It
    reads no clock and draws no random number, so that the simulator can run it too.
    """

    Options: ClassVar = StickyOptions

    def __init__(self, options: StickyOptions, legs: LegOptions, start: int = 0) -> None:
        super().__init__(legs, start)
        self._max_lead = options.max_lead_requests
        self._prefill_in_use: InstanceId | None = None
        self._decode_in_use: InstanceId | None = None

    def choose_prefill(
        self, request: RequestView, views: Sequence[InstanceView], now_s: float
    ) -> InstanceView:
        chosen = self._choose(views, self._prefill_in_use)
        self._prefill_in_use = chosen.id
        return chosen

    def choose_decode(self, views: Sequence[InstanceView], now_s: float) -> InstanceView:
        chosen = self._choose(views, self._decode_in_use)
        self._decode_in_use = chosen.id
        return chosen

    def _choose(self, views: Sequence[InstanceView], in_use: InstanceId | None) -> InstanceView:
        idlest = min(views, key=lambda view: view.inflight_requests)
        for view in views:
            lead = view.inflight_requests - idlest.inflight_requests
            if view.id == in_use and lead <= self._max_lead:
                return view
        return idlest
