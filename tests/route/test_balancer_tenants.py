"""Tenants behind a balancer: replicas know them apart, and each has limits of its own."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from msgspec import structs

from banaserve.base.access.tenants import TENANT_FIELD, is_tenant_name, tenant_name
from banaserve_route.balancer.config import (
    BalancerSettings,
    PeerSettings,
    PolicySettings,
    ReplicaSettings,
    TenantSettings,
)

KEYS = ("first", "second")


def shown(key, more=""):
    return f"Authorization: Bearer {key}\r\n{more}"


async def test_a_replica_is_told_who_asks_and_no_client_can_say_it(house):
    replica = await house.replica()
    await house.balance(replica, api_keys=KEYS, replica_key="ours")
    forged = f"{TENANT_FIELD}: {tenant_name('ours', 'second')}\r\n"
    for key, more in (("first", ""), ("second", ""), ("first", forged)):
        assert (await house.ask(fields=shown(key, more))).status == 200
    first, second, again = (asked.field(TENANT_FIELD) for asked in replica.asked)
    assert first == again != second
    assert is_tenant_name(first)
    assert is_tenant_name(second)
    # Who knows a client's key but not the replica's cannot make it.
    assert first not in (tenant_name("", "first"), tenant_name("", tenant_name("", "first")))


async def test_nobody_is_told_without_a_key_for_replicas(house):
    replica = await house.replica()
    await house.balance(replica, api_keys=KEYS)
    assert (await house.ask(fields=shown("first"))).status == 200
    assert replica.asked[0].field(TENANT_FIELD) is None


async def test_a_tenant_is_the_same_in_every_region(house):
    replica = await house.replica()
    there = BalancerSettings(
        region="us",
        replicas=(ReplicaSettings(url=replica.url),),
        api_keys=KEYS,
        replica_key="ours",
        peer_key="peers",
        peers=(PeerSettings(region="eu", url="http://127.0.0.1:1"),),
    )
    _, port, _ = await house.open(there)
    here = BalancerSettings(
        region="eu",
        api_keys=KEYS,
        peer_key="peers",
        peers=(PeerSettings(region="us", url=f"http://127.0.0.1:{port}"),),
        policy=PolicySettings(name="skywalker"),
    )
    balancer, own_port, _ = await house.open(here)
    await house.until(lambda: balancer.is_ready)
    for at in (port, own_port):
        caller = await house.caller(at)
        assert (await caller.ask(fields=shown("first"))).status == 200
        caller.hang_up()
    direct, forwarded = (asked.field(TENANT_FIELD) for asked in replica.asked)
    assert direct == forwarded
    assert is_tenant_name(direct)


async def test_requests_at_once_of_a_tenant_leave_others_alone(house):
    go_on = asyncio.Event()

    async def hold(asked):
        await go_on.wait()
        await asked.answer()

    replica = await house.replica(hold)
    tenants = (TenantSettings(key="first", max_requests=1), TenantSettings(key="second"))
    balancer = await house.balance(replica, tenants=tenants)
    first = asyncio.create_task(house.ask(fields=shown("first")))
    await house.until(lambda: len(replica.asked) == 1)
    refused = await house.ask(fields=shown("first"))
    long = await house.ask(fields=shown("first"), body=b"x" * 100_000)
    other = asyncio.create_task(house.ask(fields=shown("second")))
    await house.until(lambda: len(replica.asked) == 2)
    go_on.set()
    assert [(await one).status for one in (first, other)] == [200, 200]
    assert (await house.ask(fields=shown("first"))).status == 200
    for one in (refused, long):
        assert (one.status, one.fields["retry-after"]) == (429, "1")
        assert one.json["error"]["message"].startswith("this API key may have 1 requests at once")
    page = balancer.metrics.page().decode()
    assert 'banaserve_route_over_limits_total{limit="max_requests"} 2.0' in page
    assert sum("may have 1 requests" in line for line in house.log) >= 1


async def test_a_refusal_leaves_the_connection_open(house):
    replica = await house.replica()
    tenants = (TenantSettings(key="first", requests_per_minute=1), TenantSettings(key="second"))
    await house.balance(replica, tenants=tenants)
    caller = await house.caller()
    statuses = [
        (await caller.ask(fields=shown(key))).status for key in ("first", "first", "second")
    ]
    assert statuses == [200, 429, 200]


@pytest.mark.parametrize(
    "names", [("prompt_tokens", "completion_tokens"), ("input_tokens", "output_tokens")]
)
async def test_tokens_are_those_of_the_answer_and_other_limits_hold_at_once(house, names):
    usage = {"usage": dict(zip(names, (5_000, 1_000), strict=True))}

    async def answer(asked):
        await asked.answer(200, msgspec.json.encode(usage))

    replica = await house.replica(answer)
    tenants = (TenantSettings(key="first", tokens_per_minute=600),)
    balancer = await house.balance(replica, tenants=tenants)
    assert (await house.ask(fields=shown("first"))).status == 200
    refused = await house.ask(fields=shown("first"))
    # 5,400 tokens beyond the minute's, at ten a second; the machine may have been slow.
    assert refused.status == 429
    assert 300 < int(refused.fields["retry-after"]) <= 541
    balancer.change(structs.replace(balancer.settings, tenants=(TenantSettings(key="first"),)))
    assert (await house.ask(fields=shown("first"))).status == 200


async def test_a_stream_may_state_its_tokens_before_its_last_part(house):
    go_on = asyncio.Event()

    async def stream(asked):
        await asked.begin_stream()
        await asked.event("{}")
        await asked.event('{"usage": {"prompt_tokens": 5000, "completion_tokens": 1000}}')
        await go_on.wait()
        await asked.event("[DONE]")
        await asked.end_stream()

    tenants = (TenantSettings(key="first", tokens_per_minute=600),)
    balancer = await house.balance(await house.replica(stream), tenants=tenants)
    caller = await house.caller()
    head = f"POST /v1/x HTTP/1.1\r\nHost: b\r\nContent-Length: 0\r\n{shown('first')}\r\n"
    await caller.send(head.encode())
    await caller.head()
    chunks = caller.chunks()
    assert b"usage" in [await anext(chunks) for _ in range(2)][1]
    go_on.set()
    assert [one async for one in chunks] == [b"data: [DONE]\n\n"]
    await house.until(lambda: not balancer._under_way)
    assert int((await house.ask(fields=shown("first"))).fields["retry-after"]) > 300


async def test_a_client_that_goes_away_gives_its_place_back(house):
    replica = await house.replica(lambda asked: asked.until_gone())
    tenants = (TenantSettings(key="first", max_requests=1),)
    await house.balance(replica, tenants=tenants)
    for number in range(3):
        caller = await house.caller()
        await caller.send(
            b"POST /v1/x HTTP/1.1\r\nHost: b\r\nContent-Length: 2\r\n"
            b"Authorization: Bearer first\r\n\r\n{}"
        )
        await house.until(lambda: len(replica.asked) == number + 1)  # noqa: B023
        caller.hang_up()
        await house.until(lambda: not house.balancer._under_way)
