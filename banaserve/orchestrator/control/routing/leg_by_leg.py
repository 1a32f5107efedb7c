"""Base class of the policies that choose the instance of each leg separately."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import inf

from banaserve.base.types import ClusterView, InstanceView, RequestView, Role, Route
from banaserve.orchestrator.control.model.moving import way_s
from banaserve.orchestrator.control.routing.legs import LegOptions, LegReason, plan_legs
from banaserve.orchestrator.control.routing.rotation import Rotation


class LegByLeg(ABC):
    """A routing policy that a subclass completes with one choice for each kind of leg.

    Choices get at least one candidate, the one chosen longest ago first, and must take the first of
    equals, so that equals take turns. If the hand-over would leave the machine, instances that the
    subclass calls as good as its choice are considered too, and the pair with the fastest path is
    taken, within one machine if possible.
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
        """Return the instance of ``views`` that computes the prompt."""

    @abstractmethod
    def choose_decode(self, views: Sequence[InstanceView], now_s: float) -> InstanceView:
        """Return the instance of ``views`` that decodes after a prefill leg elsewhere."""

    def choose_both(
        self, request: RequestView, views: Sequence[InstanceView], now_s: float
    ) -> InstanceView:
        """Return the instance of ``views`` that serves both legs of the request."""
        return self.choose_decode(views, now_s)

    def as_good_prefill(
        self,
        request: RequestView,
        chosen: InstanceView,
        views: Sequence[InstanceView],
        now_s: float,
    ) -> Sequence[InstanceView]:
        """Return the instances of ``views`` as good as ``chosen`` for prefill, ``chosen`` first.

        None of them may serve both legs. Called only if the hand-over would leave the machine.
        """
        return (chosen,)

    def as_good_decode(
        self, chosen: InstanceView, views: Sequence[InstanceView], now_s: float
    ) -> Sequence[InstanceView]:
        """Return the instances of ``views`` as good as ``chosen`` for decode, ``chosen`` first."""
        return (chosen,)


def nearest(
    firsts: Sequence[InstanceView], seconds: Sequence[InstanceView], tokens: int
) -> tuple[InstanceView, InstanceView]:
    """Return the pair with the shortest transfer time for the KV of ``tokens`` tokens.

    Pure. Among equals, the earlier one of ``firsts`` is taken, then of ``seconds``.
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
    """Return ``chosen``, the answer of ``method``.

    Raises:
        TypeError: ``chosen`` is not an ``InstanceView``.
    """
    if not isinstance(chosen, InstanceView):
        what = type(chosen).__name__
        raise TypeError(f"{method} returned a value of type {what}, which is no InstanceView")
    return chosen
