"""Dispatcher that asks the policy for each request's target, within the balancer's limits."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from banaserve.base.errors import PolicyError, one_line
from banaserve.base.net.refusal_log import RefusalLog
from banaserve_route.balancer.auth import PEER_FIELD, REGIONS_FIELD
from banaserve_route.balancer.config import BalancerSettings
from banaserve_route.balancer.http.request import ClientRequest
from banaserve_route.balancer.requests.hedging import HedgeEvent, Hedger
from banaserve_route.balancer.requests.queue import RequestQueue
from banaserve_route.balancer.requests.routing_request import without_tried
from banaserve_route.balancer.targets.membership import TargetRegistry
from banaserve_route.balancer.targets.target import Target
from banaserve_route.balancer.tenants import tenant_field
from banaserve_route.policies import registry
from banaserve_route.policies.fleet import Fleet
from banaserve_route.policies.interface import Request, RoutingDecision


class Dispatcher:
    """Shared part of all requests under way: targets, policy, queue and limits.

    Attributes:
        fleet: The targets' counters, and the policy.
        queue: Requests that wait for a target.
        log: Called with one line per event.
        max_attempts: Maximum number of targets tried for a request before an answer's first byte.
        max_queue: Maximum number of requests that wait.
        queue_timeout_s: Maximum time of each wait, in seconds.
        prompt_limits: Maximum prompt lengths of replicas in tokens, sorted.
        hedger: Time limits and budget of hedged requests; None if there are none.
    """

    def __init__(
        self,
        fleet: Fleet,
        targets: TargetRegistry,
        queue: RequestQueue,
        hedger: Hedger,
        log: Callable[[str], None],
    ) -> None:
        self.fleet, self.queue, self.log = fleet, queue, log
        self._targets = targets
        self._hedger = hedger
        self._lacks = RefusalLog(log)
        self.take_settings(BalancerSettings())

    def take_settings(self, settings: BalancerSettings) -> None:
        """Apply the limits of ``settings`` from now on."""
        self._policy = registry.POLICIES.label(settings.policy.name)
        self.max_attempts = settings.limits.max_attempts
        self.max_queue = settings.limits.max_queue
        self.queue_timeout_s = settings.limits.queue_timeout_s
        self.prompt_limits = sorted({one.max_prompt_tokens for one in settings.replicas} - {0})
        self.hedger = self._hedger if settings.hedge.after else None
        self._hedger.take_settings(settings.hedge)
        self._has_keys = bool(settings.api_keys or settings.tenants)

    def decide(self, request: Request, without: set[str]) -> RoutingDecision:
        """Return the policy's decision, without the targets in ``without`` if others remain.

        A target that is full remains: the request waits for it.

        Raises:
            PolicyError: The policy fails, or names an unknown target.
        """
        view = self.fleet.view(monotonic())
        if without and (self.has_other(request, without) or self.has_alive(request, without)):
            view = without_tried(view, without)
        try:
            decision = self.fleet.policy.choose(request, view)
            target = decision.target
            if target is None or target in self._targets.targets:
                return decision
        # The policy may be another package's code, in which sys.exit would end the balancer.
        except (Exception, SystemExit) as error:
            raise PolicyError(f"policy {self._policy}: {one_line(error)}") from error
        raise PolicyError(f"policy {self._policy}: there is no replica {target!r}")

    def decide_hedge(
        self, request: Request, tried: set[str], first: Target
    ) -> RoutingDecision | HedgeEvent:
        """Return a decision for a second attempt beside the one at ``first``, or why there is none.

        Args:
            tried: Targets that are not asked again, ``first`` among them.

        Raises:
            PolicyError: The policy fails, or names an unknown target.
        """
        others = [one for one in self.others(request, tried) if not one.is_peer]
        if not any(one.view.is_available for one in others):
            return HedgeEvent.NO_REPLICA
        decision = self.decide(request, tried)
        second = next((one.view for one in others if one.view.id == decision.target), None)
        if second is None:
            return HedgeEvent.NO_REPLICA
        if self.queue or second.pending or second.prefilling > first.view.prefilling:
            return HedgeEvent.OVERLOADED
        return decision if self._hedger.spend() else HedgeEvent.OVER_BUDGET

    def count_hedge(self, event: HedgeEvent) -> None:
        self._hedger.counts[event] += 1

    def has_other(self, request: Request, tried: set[str]) -> bool:
        """Return whether a target that is not in ``tried`` may be sent ``request`` at present."""
        return any(one.view.is_available for one in self.others(request, tried))

    def has_alive(self, request: Request, tried: set[str]) -> bool:
        """Return whether a target not in ``tried`` may be sent ``request`` once it has room."""
        return any(one.is_up for one in self.others(request, tried))

    def others(self, request: Request, tried: set[str]) -> list[Target]:
        """Return targets not in ``tried`` to which the policy may send ``request`` at some time."""
        return self._targets.others(request, tried)

    def make_room(self, why: str) -> None:
        """Close idle connections to targets: there are too few descriptors for a new one."""
        self._lacks.say("descriptors", f"this balancer itself {why}: closing idle connections")
        for target in self._targets.targets.values():
            target.pool.drop_idle()

    def target(self, decision: RoutingDecision) -> Target:
        """Return the target of ``decision``, which has one."""
        assert decision.target is not None
        return self._targets.targets[decision.target]

    def fields(
        self,
        target: Target,
        message: ClientRequest,
        request: Request,
        parent: bytes,
        identity: str = "",
    ) -> bytes:
        """Return the header lines that the hop to ``target`` alone needs.

        Args:
            parent: W3C trace context for the next hop; empty for none.
            identity: Name of the tenant that asks; empty for none.
        """
        fields = target.fields
        # A key of this balancer's clients is not shown to a replica.
        is_for_replica = target.takes_keys and (not self._has_keys or PEER_FIELD in message.seen)
        if not target.key and is_for_replica and (key := message.seen.get(b"authorization")):
            fields += b"Authorization: %b\r\n" % key
        regions = request.allowed_regions
        if target.is_peer and regions is not None:
            fields += b"%b: %b\r\n" % (REGIONS_FIELD, ",".join(sorted(regions)).encode())
        if identity and (target.is_peer or target.key):
            fields += tenant_field(identity, target.key)
        if parent:
            fields += b"traceparent: %b\r\n" % parent
        return fields
