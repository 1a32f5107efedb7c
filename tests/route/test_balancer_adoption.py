"""A peer with the shared key is not believed about addresses and gets no key sent anywhere."""

from __future__ import annotations

import msgspec
import pytest

from banaserve_route.balancer.config import HealthSettings, PeerSettings, ReplicaSettings
from banaserve_route.balancer.targets import peers

HEALTH = HealthSettings(interval_s=0.05, report_interval_s=0.02, breaker_pause_s=0.05)
ELSEWHERE = "127.0.0.2"


@pytest.fixture
async def told(house, monkeypatch):
    """``told(adopt)``: a balancer whose peer has died after it told of three servers."""
    monkeypatch.setattr(peers, "DEAD_AFTER_S", 0.1)
    seen = {"here": [], "configured": []}

    async def start(adopt=(), **settings):
        def noting(name):
            async def behave(asked):
                seen[name].append(asked)
                await asked.answer()

            return behave

        here = await house.replica(noting("here"))
        configured = await house.replica(noting("configured"))
        urls = [here.url, f"http://{ELSEWHERE}:{here.port}", configured.url]
        state = {"region": "us", "replicas": [{"url": url, "id": url} for url in urls]}

        async def tell(asked):
            await asked.answer(200, msgspec.json.encode(state))

        peer = await house.replica(tell)
        known = ReplicaSettings(url=configured.url)
        balancer = await house.balance(
            region="eu",
            peers=(PeerSettings(region="us", url=peer.url, replicas=(known,), adopt=adopt),),
            peer_key="peers",
            replica_key="secret",
            health=HEALTH,
            **settings,
        )
        await house.until(lambda: peer.asked)
        await house.until(
            lambda: all(one.state.replicas for one in balancer.registry._peers.values())
        )
        peer.stop()
        await house.until(lambda: balancer.registry.adopted)
        return balancer, urls

    return start, seen


async def test_only_what_the_settings_allow_is_called_and_shown_a_key(house, told):
    start, seen = told
    balancer, (here, elsewhere, configured) = await start(api_keys=("client",))
    assert set(balancer.registry.adopted["us"]) == {here, configured}
    assert elsewhere not in balancer.targets
    await house.until(lambda: all(one.is_healthy for one in balancer.targets.values()))
    for _ in range(20):
        reply = await house.ask(fields="Authorization: Bearer client\r\n")
        assert reply.status == 200
    assert seen["here"]
    assert seen["configured"]
    assert {one.field("authorization") for one in seen["here"]} == {None}
    assert {one.field("authorization") for one in seen["configured"]} == {"Bearer secret"}
    assert any("allow their addresses with adopt" in line for line in house.log)


async def test_a_network_that_is_allowed_is_served_with_the_key(house, told):
    start, _ = told
    balancer, urls = await start(adopt=(f"{ELSEWHERE}/32", "127.0.0.1/32"))
    assert set(balancer.registry.adopted["us"]) == set(urls)
    assert {one.key for one in balancer.targets.values()} == {"secret"}


async def test_a_client_s_own_key_goes_to_no_address_that_was_told(house, told):
    start, seen = told
    await start()
    for _ in range(20):
        await house.ask(fields="Authorization: Bearer mine\r\n")
    assert seen["here"]
    assert {one.field("authorization") for one in seen["here"]} == {None}
