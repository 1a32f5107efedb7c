"""Base class of replica policies, with a filter of candidates and callbacks that do nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from banaserve.base.errors import UserError
from banaserve_route.policies.interface import (
    FleetView,
    Flight,
    Generator,
    Need,
    ReplicaId,
    ReplicaView,
    Request,
    RoutingDecision,
    RoutingReason,
    State,
)


@dataclass(frozen=True, slots=True)
class NoOptions:
    """Options of a policy that has none."""


class NoCallbacks:
    """Callbacks of a policy that neither learns nor keeps state."""

    def on_sent(self, flight: Flight) -> None: ...

    def on_first_token(self, flight: Flight) -> None: ...

    def on_finished(self, flight: Flight) -> None: ...

    def on_failed(self, flight: Flight) -> None: ...

    def on_replica_gone(self, target: ReplicaId) -> None: ...

    def tick(self, now_s: float) -> None: ...

    def hold_safe(self, is_held: bool) -> None: ...

    def state(self) -> State:
        return {}

    def restore(self, state: State) -> None:
        if state:
            raise UserError(f"this policy keeps no state: remove {', '.join(sorted(state))}")


class Policy(NoCallbacks, ABC):
    """A policy that a subclass completes with one choice among the filtered replicas.

    The subclass is registered, by ``registry.register`` or as an entry point of the group
    ``banaserve.replica_policies``. It is built with the chosen preset, changed by the user's
    options: each preset is an instance of a frozen dataclass of the policy's own options, which
    raises ``UserError`` for a value out of range. The policy sees no other option. It reads no
    clock, and ``generator`` is its only source of random numbers.

    Attributes:
        PRESETS: Options by preset name; the first preset is the default.
        needs: Input that the policy reads; see ``Need``. Without ``PEERS``, a request is served in
            its own region.
    """

    PRESETS: ClassVar[Mapping[str, Any]]
    needs: frozenset[Need] = frozenset({Need.REQUEST})

    def __init__(self, options: Any, generator: Generator, unit_bytes: int) -> None:
        self.options = options
        self.generator = generator
        self.unit_bytes = unit_bytes

    def choose(self, request: Request, fleet: FleetView) -> RoutingDecision:
        known = self._known(request, fleet)
        regions, model, tokens = request.allowed_regions, request.model, request.num_tokens
        # ``may_serve`` written out: it takes most of a decision's time with hundreds of replicas.
        candidates = [
            view
            for view in known
            if view.is_available
            and (regions is None or view.region in regions)
            and (not model or not view.models or model in view.models)
            and (not view.max_prompt_tokens or tokens <= view.max_prompt_tokens)
        ]
        if not candidates:
            may_wait = any(may_serve(view, request) for view in known)
            return RoutingDecision(
                None, RoutingReason.NONE_AVAILABLE if may_wait else RoutingReason.NONE_MAY
            )
        return self.pick(request, candidates, fleet)

    @abstractmethod
    def pick(
        self, request: Request, candidates: Sequence[ReplicaView], fleet: FleetView
    ) -> RoutingDecision:
        """Return the decision; there is at least one candidate, all are allowed and available."""

    def _known(self, request: Request, fleet: FleetView) -> Sequence[ReplicaView]:
        if not fleet.peers or request.was_forwarded or Need.PEERS not in self.needs:
            return fleet.replicas
        return [*fleet.replicas, *fleet.peers]

    def any_of(self, views: Sequence[ReplicaView]) -> ReplicaView:
        """Return one of ``views`` at random; draws a number only if there are several."""
        if len(views) == 1:
            return views[0]
        return views[int(self.generator.random() * len(views))]

    def least(self, costs: Sequence[float], within: float = 0.0) -> int:
        """Return the index of the least cost, at random among costs at most ``within`` above it."""
        limit = min(costs) + within
        places = [place for place, cost in enumerate(costs) if cost <= limit]
        if len(places) == 1:
            return places[0]
        return places[int(self.generator.random() * len(places))]


def may_serve(view: ReplicaView, request: Request) -> bool:
    """Return whether ``view`` may ever get ``request``, by region, model and prompt length."""
    return (
        (request.allowed_regions is None or view.region in request.allowed_regions)
        and (not request.model or not view.models or request.model in view.models)
        and (not view.max_prompt_tokens or request.num_tokens <= view.max_prompt_tokens)
    )


def check_range(options: object, ranges: Mapping[str, tuple[float, float]]) -> None:
    """Check that each option named in ``ranges`` is within its bounds.

    Raises:
        UserError: An option is out of range or not a number; the message names option and range.
    """
    for name, (low, high) in ranges.items():
        value = getattr(options, name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UserError(f"{name} is {value!r}: give a number")
        if not low <= value <= high:
            raise UserError(f"{name} is {value:g}: give {low:g} to {high:g}")


def check_choice(name: str, value: str, known: Iterable[str]) -> None:
    """Check that ``value`` is one of ``known``.

    Raises:
        UserError: ``value`` is unknown.
    """
    if value not in known:
        raise UserError(f"{name} is {value!r}: give {' or '.join(known)}")
