"""What an exchange needs of its balancer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from banaserve.balancer.line import Line
from banaserve.balancer.metrics import Metrics
from banaserve.balancer.target import Target
from banaserve.orchestrator.replicas.fleet import Fleet
from banaserve.orchestrator.replicas.interface import Decision, Request

if TYPE_CHECKING:
    from banaserve.balancer.exchange import Exchange


class Office(Protocol):
    """The balancer, as one request's exchange sees it."""

    fleet: Fleet
    line: Line
    metrics: Metrics
    targets: dict[str, Target]
    max_attempts: int
    max_queue: int

    def decide(self, request: Request, without: set[str]) -> Decision:
        """Asks the policy, leaving out ``without`` where other targets are left."""
        ...

    def has_other(self, request: Request, tried: set[str]) -> bool:
        """Returns whether a target that is not in ``tried`` may serve ``request`` at present."""
        ...

    def fields(self, exchange: Exchange, target: Target) -> bytes:
        """Returns the header lines that this hop alone needs."""
        ...

    def log(self, text: str) -> None: ...

    def ended(self, exchange: Exchange) -> None: ...
