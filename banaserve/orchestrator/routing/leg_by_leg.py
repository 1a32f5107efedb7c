"""Base class of the policies that choose each leg's instance on its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import inf

from banaserve.orchestrator.model.handing_over import way_s
from banaserve.orchestrator.routing.legs import LegOptions, LegReason, plan_legs
from banaserve.orchestrator.routing.rotation import Rotation
from banaserve.types import ClusterView, InstanceView, RequestView, Role, Route


class LegByLeg(ABC):
    """A routing policy that a subclass completes with one choice for each kind of leg.

    Choices get their candidates, at least one, with the one chosen longest ago first; they take
    the earlier one among equals, and with that the equals take turns. Where a hand-over would leave
    the machine, those that a subclass calls as good as its choice are looked at too, and it goes
    the shortest way: within a machine where it can.
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
        prefill = checked(self.choose_prefill(request, views, cluster.now_s), "choose_prefill")
        if prefill.role is Role.COLOCATED:
            self._prefill_turns.take(prefill)
            return Route(None, self._decode_turns.take(prefill).id, LegReason.COLOCATED)
        others = self._decode_turns.order(legs.decode)
        decode = checked(self.choose_decode(others, cluster.now_s), "choose_decode")
        if decode.id in prefill.far:
            firsts = self.as_good_prefill(request, prefill, views, cluster.now_s)
            seconds = self.as_good_decode(decode, others, cluster.now_s)
            prefill, decode = nearest(firsts, seconds, request.prompt_tokens)
        self._prefill_turns.take(prefill)
        self._decode_turns.take(decode)
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

    def as_good_prefill(
        self,
        request: RequestView,
        chosen: InstanceView,
        views: Sequence[InstanceView],
        now_s: float,
    ) -> Sequence[InstanceView]:
        """Returns those of ``views`` that would serve as well as ``chosen``, itself first.

        None of them does both legs. Asked only where the hand-over would leave the machine.
        """
        return (chosen,)

    def as_good_decode(
        self, chosen: InstanceView, views: Sequence[InstanceView], now_s: float
    ) -> Sequence[InstanceView]:
        """Returns those of ``views`` that would go on as well as ``chosen``, itself first."""
        return (chosen,)


def nearest(
    firsts: Sequence[InstanceView], seconds: Sequence[InstanceView], tokens: int
) -> tuple[InstanceView, InstanceView]:
    """Returns the pair between which the KV of ``tokens`` takes the least time.

    Pure. Among equals the earlier one of ``firsts``, then of ``seconds``.
    """
    best, best_s = (firsts[0], seconds[0]), inf
    for first in firsts:
        for second in seconds:
            taken_s = way_s(first, second, tokens)
            if not taken_s:
                return first, second
            if taken_s < best_s:
                best, best_s = (first, second), taken_s
    return best


def checked(chosen: InstanceView, method: str) -> InstanceView:
    """Returns ``chosen``, the answer of ``method``.

    Raises:
        TypeError: It is no view.
    """
    if not isinstance(chosen, InstanceView):
        what = type(chosen).__name__
        raise TypeError(f"{method} returned a value of type {what}, which is no InstanceView")
    return chosen
