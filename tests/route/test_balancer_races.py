"""Events that come in an unlucky order: what is answered, and which replica is blamed."""

from __future__ import annotations

import asyncio
import socket
from time import monotonic

import pytest
from msgspec import structs

from banaserve_route.balancer.config import (
    HealthSettings,
    LimitSettings,
    PolicySettings,
    ReplicaSettings,
    TenantSettings,
)
from banaserve_route.balancer.server import drain
from waiting import thinks

CALM = HealthSettings(interval_s=60)
POST = b"POST /v1/completions HTTP/1.1\r\nHost: b\r\nContent-Length: %d\r\n%b\r\n"


class Steps:
    """A replica that takes a step for each request, after an event of the request's number."""

    def __init__(self, *steps):
        self.steps, self.num_asked = steps, 0
        self.may_go_on = [asyncio.Event() for _ in steps]

    async def __call__(self, asked):
        number, self.num_asked = self.num_asked, self.num_asked + 1
        await self.may_go_on[number].wait()
        if (step := self.steps[number]) == "break":
            asked.kill()
        else:
            await asked.answer(step, b"%d" % number)


async def test_a_refusal_to_head_leaves_no_body_on_the_connection(house):
    tenant = TenantSettings(key="k", requests_per_minute=1)
    await house.balance(await house.replica(), tenants=(tenant,))
    caller = await house.caller()
    key = "Authorization: Bearer k\r\n"
    assert (await caller.ask("/v1/models", fields=key, method="HEAD")).status == 200
    refused = await caller.ask("/v1/models", fields=key, method="HEAD")
    assert (refused.status, refused.fields["connection"]) == (429, "close")


async def test_a_request_that_waits_after_a_refusal_counts_once_at_its_replica(house):
    """Its client leaves while it waits: no outcome says that the replica has been slow."""
    steps = Steps(200, 503)
    replicas = [await house.replica(steps) for _ in range(2)]
    one_each = PolicySettings(
        name="skywalker", options={"push": "outstanding", "max_outstanding": 1}
    )
    balancer = await house.balance(*replicas, policy=one_each, health=CALM)
    asking = asyncio.create_task(house.ask())
    await house.until(lambda: steps.num_asked == 1)
    caller = await house.caller()
    await caller.send(POST % (0, b""))
    await house.until(lambda: steps.num_asked == 2)
    steps.may_go_on[1].set()
    await house.until(lambda: len(balancer.queue) == 1)
    caller.hang_up()
    await house.until(lambda: not balancer.queue)
    [busy] = [one for one in balancer.targets.values() if one.num_answers]
    assert [one.status for one in busy.recent] == [503]
    steps.may_go_on[0].set()
    assert (await asking).status == 200


async def test_a_client_is_asked_for_its_body_behind_a_request_under_way(house):
    steps = Steps(200, 200)
    replica = await house.replica(steps)
    await house.balance(replica)
    caller = await house.caller()
    await caller.send(POST % (0, b"") + POST % (4, b"Expect: 100-continue\r\n"))
    for one in steps.may_go_on:
        one.set()
    assert (await caller.reply()).body == b"0"
    assert await caller.head() == (100, {})
    await caller.send(b"body")
    assert (await caller.reply()).body == b"1"
    assert replica.asked[1].body == b"body"


async def test_a_connection_with_an_unread_body_carries_no_other_request(house):
    num_asked = 0

    async def serve(reader, writer):
        nonlocal num_asked
        head = await reader.readuntil(b"\r\n\r\n")
        num_asked += head.startswith(b"POST")
        # It answers at once, reads no body, and keeps the connection.
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        await go_on.wait()
        writer.transport.abort()

    go_on = asyncio.Event()
    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=1000)
    await house.balance(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", health=CALM)
    caller = await house.caller()
    for number in range(2):
        assert (await caller.ask(body=bytes(2**24))).status == 200
        assert num_asked == number + 1
    go_on.set()
    server.close()


@pytest.mark.parametrize("is_over", [True, False])
async def test_a_slow_reader_gets_the_end_of_its_answer_when_the_balancer_leaves(house, is_over):
    whole = bytes(range(256)) * 2**15
    replica = await house.replica(lambda asked: asked.answer(200, whole))
    balancer = await house.balance(replica)
    for sock in house.listening:
        # What the kernel holds for the client arrives in any case.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**16)
    caller = await house.caller()
    caller.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
    await caller.send(POST % (0, b""))
    assert (await caller.head())[0] == 200

    async def read():
        body = b""
        while part := await caller.reader.read(2**16):
            body += part
            await thinks(0.005 if balancer._under_way else 0.05)
        return body

    reading = asyncio.create_task(read())
    await house.until(lambda: not (is_over and balancer._under_way))
    await drain(balancer, asyncio.Queue())
    balancer.close()
    for relays in house.relays:
        await relays.end()
    assert await reading == whole


@pytest.mark.one_process
async def test_a_request_whose_replica_dies_late_may_still_wait_for_another(house):
    steps = Steps("break", 200, 200)
    replicas = [await house.replica(steps) for _ in range(2)]
    told = [ReplicaSettings(url=one.url, max_outstanding=1) for one in replicas]
    balancer = await house.balance(*told, health=CALM, limits=LimitSettings(max_attempts=2))
    await house.first_probes(replicas)
    asking = []
    for number in (1, 2):
        asking.append(asyncio.create_task(house.ask()))
        await house.until(lambda: steps.num_asked == number)  # noqa: B023
    # As if the first one had been under way for longer than a request may wait.
    first = next(iter(balancer._under_way))
    first.waits_until_s = 0.0
    steps.may_go_on[0].set()
    await house.until(lambda: len(balancer.queue) == 1)
    balancer.tick()
    for one in steps.may_go_on:
        one.set()
    assert [(await one).status for one in asking] == [200, 200]


@pytest.mark.one_process
async def test_a_client_that_leaves_another_request_ends_no_trial(house):
    steps = Steps(200, "break", 200)
    replica = await house.replica(steps)
    health = HealthSettings(interval_s=60, breaker_failures=1, breaker_pause_s=0.01)
    limits = LimitSettings(max_attempts=1)
    balancer = await house.balance(replica, health=health, limits=limits)
    await house.first_probes([replica])
    [target] = balancer.targets.values()
    before = await house.caller()
    await before.send(POST % (0, b""))
    await house.until(lambda: steps.num_asked == 1)
    steps.may_go_on[1].set()
    assert (await house.ask()).status == 502
    trial = asyncio.create_task(house.ask())
    await house.until(lambda: steps.num_asked == 3)
    before.hang_up()
    await house.until(lambda: target.view.outstanding == 1)
    assert not target.refresh(target.breaker.retry_at_s + 1)
    steps.may_go_on[2].set()
    assert (await trial).status == 200
    assert not target.breaker.is_open


@pytest.mark.one_process
async def test_a_replica_is_not_judged_by_requests_at_another_one_of_its_id(house):
    steps = Steps(200)
    before, after = await house.replica(steps), await house.replica()
    balancer = await house.balance(ReplicaSettings(url=before.url, id="r"), health=CALM)
    asking = asyncio.create_task(house.ask())
    await house.until(lambda: steps.num_asked == 1)
    moved = (ReplicaSettings(url=after.url, id="r"),)
    balancer.change(structs.replace(balancer.settings, replicas=moved))
    assert balancer._ejector._recent(monotonic()) == {"r": []}
    steps.may_go_on[0].set()
    assert (await asking).status == 200


async def test_nothing_is_taken_behind_an_answer_with_which_a_connection_ends(house):
    replica = await house.replica()
    tenants = (TenantSettings(key="k", requests_per_minute=1), TenantSettings(key="other"))
    await house.balance(replica, tenants=tenants)
    caller = await house.caller()
    head = b"HEAD /v1/models HTTP/1.1\r\nHost: b\r\nAuthorization: Bearer %b\r\n\r\n"
    await caller.send(head % b"k")
    assert (await caller.reply(to_head=True)).status == 200
    await caller.send(head % b"k" + head % b"other")
    assert (await caller.head())[0] == 429
    await caller.reader.read()
    await house.ask("/v1/models", fields="Authorization: Bearer other\r\n", method="GET")
    assert [one.line.split()[0] for one in replica.asked] == ["HEAD", "GET"]


async def test_bytes_behind_the_last_request_are_no_error_of_ours(house, caplog):
    await house.balance(await house.replica())
    caller = await house.caller()
    await caller.send(b"GET /health HTTP/1.1\r\nHost: b\r\nConnection: close\r\n\r\nmore")
    assert (await caller.reply()).status == 200
    assert await caller.reader.read() == b""
    assert not caplog.records
