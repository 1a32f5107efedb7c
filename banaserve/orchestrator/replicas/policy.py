"""Base class of replica policies: filters candidates, and has callbacks that do nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from banaserve.errors import UserError
from banaserve.orchestrator.replicas.interface import (
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
    """Callbacks of a policy that learns nothing and keeps nothing."""

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
    """A policy that a subclass completes with one choice among the replicas that are left.

    The subclass is registered, by ``registry.register`` or as an entry point of the group
    ``banaserve.replica_policies``. It is built with the chosen preset, changed by the user's
    options: each preset is an instance of a frozen dataclass of the policy's own options, which
    raises ``UserError`` for a value out of range. The policy sees no other option. It reads no
    clock, and ``generator`` is its only source of random numbers.

    Attributes:
        PRESETS: Named options, the first one the default.
        needs: What the policy reads; see ``Need``. Without ``PEERS`` a request is served in its
            own region.
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
        # ``may_serve`` written out: this is most of a decision over hundreds of replicas.
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
        """Returns the decision; ``candidates`` are allowed, available and at least one."""

    def _known(self, request: Request, fleet: FleetView) -> Sequence[ReplicaView]:
        if not fleet.peers or request.was_forwarded or Need.PEERS not in self.needs:
            return fleet.replicas
        return [*fleet.replicas, *fleet.peers]

    def any_of(self, views: Sequence[ReplicaView]) -> ReplicaView:
        """Returns one of ``views`` at random; draws only where there is a choice."""
        if len(views) == 1:
            return views[0]
        return views[int(self.generator.random() * len(views))]

    def least(self, costs: Sequence[float], within: float = 0.0) -> int:
        """Returns the place of the least cost, at random among those at most ``within`` above."""
        limit = min(costs) + within
        places = [place for place, cost in enumerate(costs) if cost <= limit]
        if len(places) == 1:
            return places[0]
        return places[int(self.generator.random() * len(places))]


def may_serve(view: ReplicaView, request: Request) -> bool:
    """Whether ``view`` may ever be sent ``request``: region, model and length of the prompt."""
    return (
        (request.allowed_regions is None or view.region in request.allowed_regions)
        and (not request.model or not view.models or request.model in view.models)
        and (not view.max_prompt_tokens or request.num_tokens <= view.max_prompt_tokens)
    )


def check_range(options: object, ranges: Mapping[str, tuple[float, float]]) -> None:
    """Returns if each option named in ``ranges`` lies within its bounds.

    Raises:
        UserError: One does not, or is no number; names it and the range.
    """
    for name, (low, high) in ranges.items():
        value = getattr(options, name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UserError(f"{name} is {value!r}: give a number")
        if not low <= value <= high:
            raise UserError(f"{name} is {value:g}: give {low:g} to {high:g}")


def check_choice(name: str, value: str, known: Iterable[str]) -> None:
    """Returns if ``value`` is one of ``known``.

    Raises:
        UserError: It is not.
    """
    if value not in known:
        raise UserError(f"{name} is {value!r}: give {' or '.join(known)}")
