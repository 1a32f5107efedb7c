"""Interface of routing policies, which choose the instances of one server for a request.

Policies over replicas behind a balancer have another interface, ``route/banaserve_route/policies``;
docs/adr/0014-two-kinds-of-routing.md gives the reason.
"""

from __future__ import annotations

from typing import Protocol

from banaserve.base.types import ClusterView, RequestView, Route


class RoutingPolicy(Protocol):
    """Policy that chooses the instances that serve a request.

    A policy reads no clock, draws no random number and waits for nothing: time is
    ``cluster.now_s``, and a rotation fixed at construction breaks ties between instances. Policies
    with equal arguments give equal answers to equal calls. ``route`` is called on the event loop,
    once for each request: it must take microseconds.

    The class of a policy is registered, by ``registry.register`` or as an entry point of the group
    ``banaserve.routing_policies``. It is built as ``policy(options, legs, start)`` and has an
    attribute ``Options``: a frozen dataclass of its own options, each with a default, that raises
    ``UserError`` for a value out of range. It sees no other option. ``legs`` are ``LegOptions``,
    an argument of ``plan_legs``; ``start`` is the place where rotation among equals begins. The
    base class ``LegByLeg`` handles both, and leaves one choice for each kind of leg. With a true
    attribute ``reads_resident_tokens``, the policy gets the prompt's KV in the instances' own
    caches (``RequestView.resident_tokens``).
    """

    def route(self, request: RequestView, cluster: ClusterView) -> Route:
        """Return the instances that serve ``request``; must not change its arguments.

        Raises:
            NoInstanceError: No ready instance may serve a leg; the message names the role.
        """
        ...
