"""Base class of the policies that choose each leg's instance on its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from banaserve.orchestrator.routing.legs import LegOptions, LegReason, plan_legs
from banaserve.orchestrator.routing.rotation import Rotation
from banaserve.types import ClusterView, InstanceView, RequestView, Role, Route


class LegByLeg(ABC):
    """A routing policy that a subclass completes with one choice for each kind of leg.

    Choices get their candidates, at least one, with the one chosen longest ago first; they take
    the earlier one among equals, and with that the equals take turns.
    """

    def __init__(self, legs: LegOptions, start: int) -> None:
        self._legs = legs
        self._prefill_turns = Rotation(start)
        self._decode_turns = Rotation(start)

    def route(self, request: RequestView, cluster: ClusterView) -> Route:
        legs = plan_legs(request, cluster, self._legs)
        if not legs.prefill:
            views = self._decode_turns.order(legs.decode)
            both = self._decode_turns.take(
                checked(self.choose_both(request, views, cluster.now_s), "choose_both")
            )
            return Route(None, both.id, legs.reason)
        views = self._prefill_turns.order(legs.prefill)
        prefill = self._prefill_turns.take(
            checked(self.choose_prefill(request, views, cluster.now_s), "choose_prefill")
        )
        if prefill.role is Role.COLOCATED:
            return Route(None, self._decode_turns.take(prefill).id, LegReason.COLOCATED)
        views = self._decode_turns.order(legs.decode)
        decode = self._decode_turns.take(
            checked(self.choose_decode(views, cluster.now_s), "choose_decode")
        )
        return Route(prefill.id, decode.id, legs.reason)

    @abstractmethod
    def choose_prefill(
        self, request: RequestView, views: Sequence[InstanceView], now_s: float
    ) -> InstanceView:
        """Returns the one of ``views`` that computes the prompt."""

    @abstractmethod
    def choose_decode(self, views: Sequence[InstanceView], now_s: float) -> InstanceView:
        """Returns the one of ``views`` that goes on from a prompt computed elsewhere."""

    def choose_both(
        self, request: RequestView, views: Sequence[InstanceView], now_s: float
    ) -> InstanceView:
        """Returns the one of ``views`` that serves the whole request."""
        return self.choose_decode(views, now_s)


def checked(chosen: InstanceView, method: str) -> InstanceView:
    """Returns ``chosen``, the answer of ``method``.

    Raises:
        TypeError: It is no view.
    """
    if not isinstance(chosen, InstanceView):
        what = type(chosen).__name__
        raise TypeError(f"{method} returned a value of type {what}, which is no InstanceView")
    return chosen
