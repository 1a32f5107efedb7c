"""Choice of the replicas of another region to adopt: trust in a peer is limited. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address, ip_network

from banaserve_route.balancer.config import (
    PeerSettings,
    ReplicaSettings,
    parse_endpoint,
    replica_id,
)
from banaserve_route.balancer.targets.peers import ReplicaState


@dataclass(frozen=True, slots=True)
class AdoptableReplica:
    """Replica that may be served in place of its dead balancer.

    Attributes:
        takes_keys: True if the settings name the replica's address, so it may be shown keys.
    """

    replica: ReplicaSettings
    takes_keys: bool


def adoptable(
    peer: PeerSettings, told: Sequence[ReplicaState]
) -> tuple[list[AdoptableReplica], list[str]]:
    """Return the replicas of ``peer`` that may be adopted, and URLs of those that may not.

    The replicas in the settings may be adopted, and those that the peer has reported at addresses
    that the settings allow. Other replicas at the peer's own host may be adopted, too, but are
    shown no key: the peer could listen there itself.

    Args:
        told: Replicas that the peer has reported last; empty: those in the settings are used.
    """
    known = {parse_endpoint(one.url): one for one in peer.replicas}
    if not told:
        return [AdoptableReplica(one, True) for one in peer.replicas], []
    host = parse_endpoint(peer.url).host
    found: list[AdoptableReplica] = []
    refused: list[str] = []
    seen: set[str] = set()
    for one in told:
        endpoint = parse_endpoint(one.url)
        key = known[endpoint].key if endpoint in known else ""
        replica = ReplicaSettings(
            url=one.url,
            id=one.id,
            key=key,
            models=tuple(one.models),
            max_prompt_tokens=one.max_prompt_tokens,
        )
        takes_keys = endpoint in known or any(is_allowed(one.url, place) for place in peer.adopt)
        if not takes_keys and endpoint.host != host:
            refused.append(one.url)
        elif replica_id(replica) not in seen:
            seen.add(replica_id(replica))
            found.append(AdoptableReplica(replica, takes_keys))
    return found, refused


def is_allowed(url: str, allowed: str) -> bool:
    """Return whether ``url`` is the server, or has an address in the network, ``allowed``.

    Names are not resolved: the owner of a name's zone could let the name lead anywhere.
    """
    endpoint = parse_endpoint(url)
    if "://" in allowed:
        return endpoint == parse_endpoint(allowed)
    try:
        return ip_address(endpoint.host) in ip_network(allowed)
    except ValueError:
        return False
