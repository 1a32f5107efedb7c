"""Several processes on one port: what they share, and what the death of one costs."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter

import pytest
from msgspec import structs

from banaserve_route.balancer.config import (
    LimitSettings,
    PolicySettings,
    ReplicaSettings,
    TenantSettings,
)
from banaserve_route.balancer.relays.messages import TurnAway
from counters import counted
from depth import seeds

pytestmark = pytest.mark.parametrize("processes", [2])
GROUPS, REQUESTS, CALLERS = 40, 400, 8
UNTIL_CLOSE = b"HTTP/1.1 %d Whatever\r\n\r\nbegun"


async def one_a_relay(house):
    """Returns a caller that is connected to each relay, in the order of the relays."""
    found = {}
    while len(found) < house.processes:
        caller = await house.caller()
        await house.until(lambda: caller.name in peers(house))  # noqa: B023
        if found.setdefault(peers(house)[caller.name], caller) is not caller:
            caller.hang_up()
    return [found[number] for number in range(house.processes)]


def peers(house):
    """Returns the number of the relay of each client."""
    [relays] = house.relays
    links = (one._link for one in relays._all)
    return {client.peer: n for n, link in enumerate(links) for client in link._clients.values()}


class Held:
    """A replica that answers when it may go on; what has begun are streams with one event."""

    def __init__(self, is_stream=False):
        self.may_go_on, self.is_stream = asyncio.Event(), is_stream

    async def __call__(self, asked):
        if self.is_stream:
            await asked.begin_stream()
            await asked.event("one")
        await self.may_go_on.wait()
        if self.is_stream:
            await asked.event("two")
            await asked.end_stream()
        else:
            await asked.answer()


async def test_places_of_a_replica_and_metrics_count_the_requests_of_all(house):
    held = Held()
    replica = await house.replica(held)
    balancer = await house.balance(ReplicaSettings(url=replica.url, max_outstanding=1))
    one, other = await one_a_relay(house)
    asking = [asyncio.create_task(caller.ask()) for caller in (one, other)]
    await house.until(lambda: len(balancer.queue) == 1 and len(replica.asked) == 1)
    assert balancer.targets[replica.id].view.outstanding == 1
    held.may_go_on.set()
    assert [(await one).status for one in asking] == [200, 200]
    await house.until(lambda: not balancer.metrics.num_under_way())
    for caller in (one, other):
        page = (await caller.ask("/metrics", method="GET")).body.decode()
        assert 'banaserve_route_answers_total{status="200"} 2.0' in page
        assert "banaserve_route_connections 2.0" in page
        assert "banaserve_route_under_way 0.0" in page


async def test_limits_of_a_tenant_hold_over_all_and_a_change_reaches_all(house):
    held = Held()
    tenant = TenantSettings(key="k", max_requests=1)
    balancer = await house.balance(await house.replica(held), tenants=(tenant,))
    one, other = await one_a_relay(house)
    key = "Authorization: Bearer k\r\n"
    asking = asyncio.create_task(one.ask(fields=key))
    await house.until(lambda: balancer.metrics.num_under_way() == 1)
    refused = await other.ask(fields=key)
    assert (refused.status, refused.fields["retry-after"]) == (429, "1")
    held.may_go_on.set()
    assert (await asking).status == 200
    balancer.change(structs.replace(balancer.settings, tenants=(), api_keys=("new",)))
    for caller in (one, other):
        assert (await caller.ask(fields=key)).status == 401
    [again, _] = await one_a_relay(house)
    assert (await again.ask(fields="Authorization: Bearer new\r\n")).status == 200


@pytest.mark.parametrize(
    ("number", "how"),
    [
        (signal.SIGKILL, "signal 9"),
        pytest.param(signal.SIGSTOP, "it hung", marks=pytest.mark.room),
    ],
)
async def test_a_dead_or_hung_relay_takes_only_its_own_streams_along(house, number, how):
    held = Held(is_stream=True)
    replica = await house.replica(held)
    balancer = await house.balance(replica)
    view = balancer.targets[replica.id].view
    callers = await one_a_relay(house)
    asking = [asyncio.create_task(one.ask()) for one in callers]
    await house.until(lambda: view.outstanding == 2 and not view.prefilling)
    [relays] = house.relays
    os.kill(relays._all[0].pid, number)
    assert not (await asking[0]).is_whole
    await house.until(lambda: view.outstanding == 1 and len(balancer.connections) == 1)
    held.may_go_on.set()
    assert (await asking[1]).is_whole
    balancer.fleet.check()
    await house.until(lambda: counted(balancer, "relay_ends") == 1)
    assert any(f"has ended: {how}" in line for line in house.log)
    for caller in await one_a_relay(house):
        assert (await caller.ask()).is_whole


@pytest.mark.parametrize(
    ("version", "status", "begin"),
    [("1.0", 200, None), ("1.1", 200, UNTIL_CLOSE), ("1.1", 400, UNTIL_CLOSE)],
)
async def test_no_client_takes_a_part_of_an_answer_for_the_whole(house, version, status, begin):
    async def until_close(asked):
        await asked.send(begin % status)
        await asked.until_gone()

    await house.balance(await house.replica(until_close if begin else Held(is_stream=True)))
    caller, _ = await one_a_relay(house)
    head = f"POST /v1/completions HTTP/{version}\r\nHost: b\r\nContent-Length: 2\r\n\r\n"
    await caller.send(head.encode() + b"{}")
    assert (await caller.head())[0] == status
    [relays] = house.relays
    os.kill(relays._all[0].pid, signal.SIGKILL)
    # Such an answer ends with its connection, which a dead process would end as usual.
    with pytest.raises(ConnectionResetError):
        await asyncio.wait_for(caller.reader.read(), 60)


async def test_a_client_that_is_refused_and_turned_away_takes_no_relay_along(house):
    await house.balance(await house.replica())
    caller, _ = await one_a_relay(house)
    link = house.relays[0]._all[0]._link
    [number] = link._clients
    await caller.send(b"nonsense\r\n\r\n")
    assert (await caller.reply()).status == 400
    link.send(TurnAway(number))  # as if the two had crossed
    await house.until(lambda: not link._clients)
    assert not link.lost.is_set()


async def test_a_stream_that_breaks_off_ends_in_an_error_for_its_client(house):
    async def break_off(asked):
        await asked.begin_stream()
        await asked.event("one")
        asked.kill()

    balancer = await house.balance(await house.replica(break_off))
    caller, _ = await one_a_relay(house)
    reply = await caller.ask()
    assert reply.is_whole
    assert b"the connection broke" in reply.body
    assert sum(one.num_broken for one in balancer.targets.values()) == 1


@pytest.mark.parametrize("policy", ["cache_aware", "skywalker"])
async def test_hits_and_balance_are_those_of_one_process(house, policy):
    found = {}
    for processes in (1, 2):
        house.processes = processes
        replicas = [await house.replica() for _ in range(3)]
        await house.balance(*replicas, policy=PolicySettings(name=policy))
        await converse(house)
        found[processes] = hits(replicas), spread([len(one.asked) for one in replicas])
    # Two balancers that know nothing of each other would pay for each beginning twice.
    assert all(one[0] >= REQUESTS - 1.25 * GROUPS for one in found.values())
    # In another order of arrival, beginnings are placed otherwise.
    assert found[2][1] <= found[1][1] + 0.4


async def converse(house):
    """Ask for prompts with a few beginnings over connections to all relays."""
    callers = [await house.caller() for _ in range(CALLERS)]
    prompts = iter([f'{{"prompt": "{chr(65 + n % GROUPS) * 2000} {n}"}}' for n in range(REQUESTS)])

    async def ask(caller):
        for prompt in prompts:
            assert (await caller.ask(body=prompt.encode())).status == 200

    await asyncio.gather(*map(ask, callers))


def hits(replicas):
    """Returns how many requests came to a replica that had got their beginning before."""
    seen = Counter((one.port, asked.body[:20]) for one in replicas for asked in one.asked)
    return sum(count - 1 for count in seen.values())


def spread(counts):
    """Returns the largest number over the mean."""
    return max(counts) * len(counts) / sum(counts)


@pytest.mark.room
@pytest.mark.parametrize("seed", seeds(4, otherwise=1))
async def test_kills_under_load_leave_no_count_behind(house, seed):
    replicas = [await house.replica() for _ in range(2)]
    limits = LimitSettings(max_outstanding=4)
    balancer = await house.balance(*replicas, limits=limits)
    [relays] = house.relays
    outcomes, is_over = Counter(), False

    async def ask():
        while not is_over:
            try:
                caller = await house.caller()
                while not is_over:
                    outcomes[(await caller.ask(body=b"x" * 20_000)).status] += 1
            except (OSError, asyncio.IncompleteReadError):
                outcomes["broken"] += 1

    asking = [asyncio.create_task(ask()) for _ in range(16)]
    for number in range(4):
        before = outcomes[200]
        await house.until(lambda: outcomes[200] >= before + 100)  # noqa: B023
        os.kill(relays._all[(seed + number) % 2].pid, signal.SIGKILL)
        await house.until(lambda: counted(balancer, "relay_ends") == number + 1)  # noqa: B023
        balancer.fleet.check()
        await house.until(lambda: all(len(one._link._clients) for one in relays._all))
    is_over = True
    await asyncio.gather(*asking)
    assert set(outcomes) == {200, "broken"}
    await house.until(lambda: not balancer.metrics.num_under_way())
    balancer.fleet.check()
    assert all(not one.view.outstanding for one in balancer.targets.values())
