"""Interface of routing policies, which choose the instances of one server for a request.

A policy over replicas behind a balancer is another interface, ``orchestrator/replicas``;
docs/adr/0014-two-kinds-of-routing.md says why.
"""

from __future__ import annotations

from typing import Protocol

from banaserve.types import ClusterView, RequestView, Route


class RoutingPolicy(Protocol):
    """Chooses the instances that serve a request.

    A policy reads no clock, draws no random number and waits for nothing: time is
    ``cluster.now_s``, and whose turn it is among equals is the rotation it was built with.
    Policies that are built alike and asked alike answer alike. ``route`` is called on the event
    loop, once a request: it takes microseconds.

    The class of a policy is registered, by ``registry.register`` or as an entry point of the group
    ``banaserve.routing_policies``. It is built as ``policy(options, legs, start)`` and has an
    attribute ``Options``: a frozen dataclass of its own options, each with a default, that raises
    ``UserError`` for a value out of range. It sees no other option. ``legs`` are ``LegOptions``, to
    be handed to ``plan_legs``; ``start`` is where rotation among equals begins. ``LegByLeg`` does
    both, and leaves one choice for each kind of leg. With an attribute ``reads_resident_tokens``
    that is true it is told where KV of the prompt lies (``RequestView.resident_tokens``).
    """

    def route(self, request: RequestView, cluster: ClusterView) -> Route:
        """Returns where ``request`` runs; changes neither argument.

        Raises:
            NoInstanceError: No ready instance may serve a leg; the message names the role.
        """
        ...
