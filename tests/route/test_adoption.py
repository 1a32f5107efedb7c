"""Replicas that a balancer looks after for a dead peer: only where its settings allow it."""

from __future__ import annotations

import msgspec
import pytest

from banaserve.base.errors import UserError
from banaserve_route.balancer.config import BalancerSettings, PeerSettings, ReplicaSettings
from banaserve_route.balancer.targets.adoption import adoptable, is_allowed
from banaserve_route.balancer.targets.peers import PeerState, ReplicaState

PEER = "http://10.1.0.1:8080"


def told(*urls: str) -> list[ReplicaState]:
    return [ReplicaState(url, "") for url in urls]


@pytest.mark.parametrize(
    ("url", "allowed", "is_it"),
    [
        ("http://10.1.2.3:80", "10.1.0.0/16", True),
        ("https://10.1.2.3", "10.1.0.0/16", True),
        ("http://10.2.2.3:80", "10.1.0.0/16", False),
        ("http://[fd00::1]:80", "fd00::/8", True),
        ("http://[fd00::1]:80", "10.1.0.0/16", False),
        ("http://replica.example:80", "0.0.0.0/0", False),
        ("http://replica.example:80", "http://replica.example", True),
        ("https://replica.example", "http://replica.example", False),
        ("http://replica.example:81", "http://replica.example:80", False),
        ("http://169.254.169.254", "10.1.0.0/16", False),
        # How a resolver may read an address that ipaddress does not.
        ("http://0x0a010203", "10.1.0.0/16", False),
        ("http://167837955", "10.1.0.0/16", False),
    ],
)
def test_an_address_is_allowed_by_url_or_network(url: str, allowed: str, is_it: bool) -> None:
    assert is_allowed(url, allowed) is is_it


def test_what_a_peer_tells_is_adopted_only_where_the_settings_allow_it() -> None:
    own = ReplicaSettings(url="http://replica.example:80", key="its-key")
    peer = PeerSettings(region="us", url=PEER, replicas=(own,), adopt=("10.1.2.0/24",))
    state = told(
        "http://replica.example:80",
        "http://10.1.2.3:80",
        "http://10.1.0.1:9999",
        "http://169.254.169.254:80",
        "http://127.0.0.1:6379",
    )
    found, refused = adoptable(peer, state)
    assert [(one.replica.url, one.replica.key, one.takes_keys) for one in found] == [
        ("http://replica.example:80", "its-key", True),
        ("http://10.1.2.3:80", "", True),
        ("http://10.1.0.1:9999", "", False),
    ]
    assert refused == ["http://169.254.169.254:80", "http://127.0.0.1:6379"]


def test_a_peer_that_has_told_nothing_has_the_replicas_of_the_settings() -> None:
    one = ReplicaSettings(url="http://10.9.9.9:80")
    found, refused = adoptable(PeerSettings(region="us", url=PEER, replicas=(one,)), [])
    assert ([one.replica for one in found], refused) == ([one], [])
    assert found[0].takes_keys


def test_an_id_that_is_told_twice_is_one_replica() -> None:
    peer = PeerSettings(region="us", url=PEER, adopt=("10.1.0.0/16",))
    state = [ReplicaState(f"http://10.1.2.{number}:80", "same") for number in (1, 2)]
    assert len(adoptable(peer, state)[0]) == 1


@pytest.mark.parametrize("place", ["", "10.1.0.0/99", "ftp://a", "http://a/path", "*.example"])
def test_an_allowed_address_that_is_none_is_refused(place: str) -> None:
    peer = PeerSettings(region="us", url=PEER, adopt=(place,))
    with pytest.raises(UserError):
        BalancerSettings(peers=(peer,), peer_key="k").check()


@pytest.mark.parametrize(
    "one",
    [
        ReplicaState("http://a", "x\ny"),
        ReplicaState("http://a", "\x1b[31m"),
        ReplicaState("http://a", "‮"),
        ReplicaState("http://a", "region:eu"),
        ReplicaState("http://a", "x", models=["a\x00"]),
        ReplicaState("file:///etc/passwd", "x"),
    ],
)
def test_a_name_that_is_not_printable_is_refused(one: ReplicaState) -> None:
    with pytest.raises(UserError) as refused:
        one.check()
    assert str(refused.value).isprintable()


@pytest.mark.parametrize(
    "state",
    [
        {"replicas": [{"url": "http://a", "id": str(i)} for i in range(257)]},
        {"replicas": [{"url": "http://a", "id": "x" * 257}]},
        {"replicas": [{"url": "http://" + "a" * 600, "id": "x"}]},
    ],
)
def test_what_a_peer_tells_is_bounded(state: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(msgspec.json.encode({"region": "us", **state}), type=PeerState)


def test_a_balancer_tells_no_more_than_its_peers_take() -> None:
    peers = (PeerSettings(region="us", url=PEER),)
    many = tuple(ReplicaSettings(url=f"http://10.0.{i // 200}.{i % 200}") for i in range(257))
    with pytest.raises(UserError, match="256 at most"):
        BalancerSettings(replicas=many, peers=peers, peer_key="k").check()
    BalancerSettings(replicas=many).check()
    with pytest.raises(UserError, match="printable"):
        BalancerSettings(replicas=(ReplicaSettings(url="http://a", id="a\nb"),)).check()
