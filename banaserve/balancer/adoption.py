"""Replicas of another region that may be looked after: a peer is believed only so far. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address, ip_network

from banaserve.balancer.config import PeerSettings, ReplicaSettings, parse_endpoint, replica_id
from banaserve.balancer.peers import ReplicaState


@dataclass(frozen=True, slots=True)
class AdoptableReplica:
    """A replica that may be looked after for a dead balancer.

    Attributes:
        takes_keys: Its address is one that the settings name: it may be shown keys.
    """

    replica: ReplicaSettings
    takes_keys: bool


def adoptable(
    peer: PeerSettings, told: Sequence[ReplicaState]
) -> tuple[list[AdoptableReplica], list[str]]:
    """Returns the replicas of ``peer`` that may be adopted, and URLs of those that may not.

    Those of the settings may, and what the peer has told at addresses that the settings allow. At
    the peer's own host others may too, but they are shown no key: a peer could listen there itself.

    Args:
        told: What the peer has told last; empty: what the settings know of it holds.
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
    """Whether ``url`` is the server ``allowed``, or has an address in the network ``allowed``.

    Names are not looked up: who owns a name's zone could let it lead anywhere.
    """
    endpoint = parse_endpoint(url)
    if "://" in allowed:
        return endpoint == parse_endpoint(allowed)
    try:
        return ip_address(endpoint.host) in ip_network(allowed)
    except ValueError:
        return False
