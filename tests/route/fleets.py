"""Fleets of replicas as a policy sees them."""

from __future__ import annotations

from random import Random
from typing import Any

from banaserve_route.policies.fleet import Fleet
from banaserve_route.policies.interface import PeerView, ReplicaId, ReplicaView
from banaserve_route.policies.registry import make

Views = dict[str, dict[str, Any]]


def fleet_of(name: str, views: Views, peers: Views | None = None, **section: Any) -> Fleet:
    """A fleet under the policy ``name``; ``section`` are its options."""
    fleet = Fleet(make(name, Random(1), **section), "us")
    for view_id, what in views.items():
        fleet.add(ReplicaView(ReplicaId(view_id), **what))
    for view_id, what in (peers or {}).items():
        fleet.add(PeerView(ReplicaId(view_id), **what))
    return fleet
