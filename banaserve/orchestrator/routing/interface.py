"""What a routing policy is."""

from __future__ import annotations

from typing import Protocol

from banaserve.types import ClusterView, RequestView, Route


class RoutingPolicy(Protocol):
    """Chooses the instances that serve a request.

    A policy reads no clock, draws no random number and waits for nothing: time is
    ``cluster.now_s``, and whose turn it is among equals is the rotation it was built with.
    Policies that are built alike and asked alike answer alike.
    """

    def route(self, request: RequestView, cluster: ClusterView) -> Route:
        """Returns where ``request`` runs; changes neither argument.

        Raises:
            NoInstanceError: No ready instance may serve a leg; the message names the role.
        """
        ...
