"""Replicas by the name of a service: addresses that come and go, and lookups that fail."""

from __future__ import annotations

import asyncio

import pytest

from banaserve.base.errors import UserError
from banaserve_route.balancer import discovery as discovery_module
from banaserve_route.balancer.balancer import Balancer
from banaserve_route.balancer.config import BalancerSettings, PeerSettings, ReplicaSettings
from banaserve_route.balancer.discovery import Discovery, resolve

NAME = "vllm.default.svc"


class Names:
    """A resolver whose answers a test sets."""

    def __init__(self, *addresses: str) -> None:
        self.addresses: list[str] | None = list(addresses)
        self.asked: list[tuple[str, int]] = []

    async def __call__(self, host: str, port: int) -> list[str] | None:
        self.asked.append((host, port))
        return self.addresses


def settings(*urls: str, **further: object) -> BalancerSettings:
    asked = tuple(ReplicaSettings(url=url, **further) for url in urls)  # type: ignore[arg-type]
    given = BalancerSettings(replicas=asked)
    given.check()
    return given


def found(discovery: Discovery) -> list[str]:
    return [one.url for one in discovery.settings.replicas]


async def test_each_address_of_a_name_is_a_replica_with_the_settings_of_the_name() -> None:
    names, said = Names("10.0.0.1", "fd00::1"), []
    given = settings(f"dns+http://{NAME}:8000", "http://other:1", max_outstanding=7)
    discovery = Discovery(given, said.append, {"dns": names})
    assert found(discovery) == ["http://other:1"]
    assert await discovery.look()
    assert names.asked == [(NAME, 8000)]
    assert found(discovery) == ["http://10.0.0.1:8000", "http://[fd00::1]:8000", "http://other:1"]
    assert {one.max_outstanding for one in discovery.settings.replicas} == {7}
    assert not await discovery.look()
    names.addresses = ["10.0.0.2"]
    assert await discovery.look()
    assert found(discovery) == ["http://10.0.0.2:8000", "http://other:1"]
    assert said == []


async def test_a_failed_lookup_changes_nothing_and_is_said_once() -> None:
    names, said = Names("10.0.0.1"), []
    discovery = Discovery(settings(f"dns+http://{NAME}:8000"), said.append, {"dns": names})
    await discovery.look()
    names.addresses = None
    assert [await discovery.look() for _ in range(3)] == [False] * 3
    assert found(discovery) == ["http://10.0.0.1:8000"]
    assert said == [f"{NAME} cannot be looked up; going on with the addresses as before"]
    names.addresses = []
    assert [await discovery.look() for _ in range(2)] == [True, False]
    assert found(discovery) == []
    assert said[1:] == [f"dns+http://{NAME}:8000 has no address"]


async def test_the_balancer_follows_the_addresses_and_keeps_what_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(discovery_module, "LOOK_S", 0.005)
    names, said = Names("127.0.0.1", "127.0.0.2"), asyncio.Queue()
    discovery = Discovery(settings("dns+http://name:9"), said.put_nowait, {"dns": names})
    await discovery.look()
    balancer = Balancer(discovery.settings, said.put_nowait)
    kept = balancer.targets["127.0.0.2:9"]
    following = asyncio.create_task(discovery.follow(balancer))
    names.addresses = ["127.0.0.2", "127.0.0.3"]
    assert "2 targets" in await asyncio.wait_for(said.get(), 60)
    assert set(balancer.targets) == {"127.0.0.2:9", "127.0.0.3:9"}
    assert balancer.targets["127.0.0.2:9"] is kept
    following.cancel()
    balancer.close()


async def test_settings_that_are_refused_leave_the_names_as_before() -> None:
    names = Names("127.0.0.1")
    discovery = Discovery(settings("dns+http://name:9"), print, {"dns": names})
    await discovery.look()
    balancer = Balancer(discovery.settings, print)
    with pytest.raises(UserError, match="is there twice"):
        await discovery.take(settings("dns+http://name:9", "http://127.0.0.1:9"), balancer)
    assert found(discovery) == ["http://127.0.0.1:9"]
    await discovery.take(settings("dns+http://name:10"), balancer)
    assert set(balancer.targets) == {"127.0.0.1:10"}
    balancer.close()


async def test_real_lookups() -> None:
    assert await resolve("127.0.0.1", 80) == ["127.0.0.1"]
    assert "127.0.0.1" in (await resolve("localhost", 80) or [])


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (ReplicaSettings(url="dns+https://name:1"), "list the servers' URLs"),
        (ReplicaSettings(url="dns+http://name:1", id="a"), "several ids"),
        (ReplicaSettings(url="dns+http://na me:1"), "no address of a server"),
        (ReplicaSettings(url="dns+name:1"), "no address of a server"),
    ],
)
def test_names_that_cannot_be_looked_up_are_refused(one: ReplicaSettings, words: str) -> None:
    with pytest.raises(UserError, match=words):
        BalancerSettings(replicas=(one,)).check()


def test_a_peer_tells_addresses() -> None:
    peer = PeerSettings(
        region="us", url="http://a:1", replicas=(ReplicaSettings(url="dns+http://name:1"),)
    )
    with pytest.raises(UserError, match="list the servers' addresses"):
        BalancerSettings(peers=(peer,), peer_key="k").check()
