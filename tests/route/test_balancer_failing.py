"""Replicas that fail behind a balancer: what is tried again, what breaks off, who is left alone."""

from __future__ import annotations

import asyncio
import inspect
import random
import re
import socket

import pytest

from banaserve_route.balancer.config import (
    HealthSettings,
    PolicySettings,
    ReplicaSettings,
    parse_endpoint,
)
from banaserve_route.balancer.http.replica_connection import ConnectionPool
from banaserve_route.balancer.targets import health as health_probes
from banaserve_route.policies import registry
from banaserve_route.policies.interface import Need
from depth import chosen_seed


async def kill(asked):
    asked.kill()


def dead_url():
    """The URL of a port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return f"http://127.0.0.1:{sock.getsockname()[1]}"


@pytest.mark.parametrize("answered", [429, 502, 503, 504])
async def test_another_replica_is_asked_before_the_first_byte(house, answered):
    busy = await house.replica(lambda asked: asked.answer(answered))
    broken = await house.replica(kill)
    well = await house.replica(lambda asked: asked.answer(200, b"well"))
    await house.balance(busy, broken, well, dead_url())
    for _ in range(6):
        assert (await house.ask()).body == b"well"
    assert busy.asked
    assert broken.asked


async def test_a_refusal_that_everybody_gives_passes_as_it_is(house):
    async def refuse(asked):
        await asked.answer(503, b"busy", "Retry-After: 7\r\n")

    replicas = [await house.replica(refuse) for _ in range(2)]
    await house.balance(*replicas)
    reply = await house.ask()
    assert (reply.status, reply.body, reply.fields["retry-after"]) == (503, b"busy", "7")
    assert [len(one.asked) for one in replicas] == [1, 1]


@pytest.mark.parametrize("status", [400, 401, 404, 422, 500])
async def test_an_error_that_is_the_request_s_own_is_not_tried_again(house, status):
    replicas = [await house.replica(lambda asked: asked.answer(status)) for _ in range(2)]
    balancer = await house.balance(*replicas)
    for _ in range(4):
        assert (await house.ask()).status == status
    assert sum(len(one.asked) for one in replicas) == 4
    assert not any(one.breaker.is_open for one in balancer.targets.values())


async def test_nobody_answers(house):
    await house.balance(await house.replica(kill), await house.replica(kill))
    reply = await house.ask()
    assert reply.status == 502
    assert "the connection broke, after 3 attempts" in reply.json["error"]["message"]
    assert "retry-after" in reply.fields


async def test_a_request_that_a_dead_replica_refuses_waits_for_one_that_is_full(house):
    async def stay(asked):
        await is_free.wait()
        await asked.answer(200, b"well")

    is_free = asyncio.Event()
    full, dead = await house.replica(stay), await house.replica()
    told = ReplicaSettings(url=full.url, max_outstanding=1)
    # No probe notices the death.
    balancer = await house.balance(told, dead, health=HealthSettings(interval_s=60))
    dead.stop()
    asking = [asyncio.create_task(house.ask()) for _ in range(2)]
    await house.until(lambda: len(balancer.queue) == 1 or any(one.done() for one in asking))
    is_free.set()
    assert [(await one).status for one in asking] == [200, 200]
    assert balancer.targets[dead.id].breaker.num_opened == 0


@pytest.mark.one_process
async def test_a_request_that_waits_for_a_full_replica_holds_up_no_other(house):
    async def stay(asked):
        await is_free.wait()
        await asked.answer()

    async def answer_or_break(asked):
        # One break of an idle connection is no failure of the replica.
        if balancer.targets[full.id].is_full and len(broken) < 2:
            broken.append(asked)
            asked.kill()
        else:
            await asked.answer(200, b"well")

    is_free, broken = asyncio.Event(), []
    full, other = await house.replica(stay), await house.replica(answer_or_break)
    balancer = await house.balance(ReplicaSettings(url=full.url, max_outstanding=1), other)
    asking = [asyncio.create_task(house.ask()) for _ in range(2)]  # replicas take turns
    await house.until(lambda: full.asked and (asking[0].done() or asking[1].done() or broken))
    if not broken:
        asking.append(asyncio.create_task(house.ask()))
    await house.until(lambda: len(balancer.queue) == 1)
    assert (await house.ask()).body == b"well"
    is_free.set()
    assert [(await one).status for one in asking] == [200] * len(asking)


async def test_an_idle_connection_that_the_replica_closes_costs_nothing(house):
    async def answer_and_close(asked):
        await asked.answer()
        asked.writer.close()

    replica = await house.replica(answer_and_close)
    balancer = await house.balance(replica)
    for _ in range(4):
        assert (await house.ask()).status == 200
    assert balancer.targets[replica.id].num_broken == 0
    assert house.log == []


async def test_a_stream_that_breaks_between_events_ends_in_an_error_event(house):
    async def begin(asked):
        await asked.begin_stream()
        await asked.event("one")
        asked.kill()

    other = await house.replica()
    await house.balance(await house.replica(begin), other)
    replies = [await house.ask() for _ in range(2)]
    broken = next(one for one in replies if one.body != b"{}")
    assert broken.is_whole
    assert broken.body.startswith(b"data: one\n\ndata: ")
    assert b"the connection broke" in broken.body
    assert len(other.asked) == 1


async def test_a_stream_that_breaks_before_its_first_event_is_tried_again(house):
    async def only_begin(asked):
        await asked.begin_stream()
        asked.kill()

    broken, well = await house.replica(only_begin), await house.replica()
    await house.balance(broken, well)
    assert [(await house.ask()).body for _ in range(4)] == [b"{}"] * 4
    assert broken.asked


@pytest.mark.one_process
async def test_a_stream_waits_for_its_first_token_until_its_first_event(house):
    async def stream(asked):
        await asked.begin_stream()
        await may_go_on.wait()
        await asked.event("one")
        await asked.end_stream()

    may_go_on = asyncio.Event()
    replica = await house.replica(stream)
    balancer = await house.balance(replica)
    target = balancer.targets[replica.id]
    asking = asyncio.create_task(house.ask())
    await house.until(lambda: any(one._early for one in target.pool._all))
    assert target.view.prefilling == 1
    may_go_on.set()
    assert (await asking).body == b"data: one\n\n"


async def test_an_answer_that_breaks_within_is_not_taken_for_a_whole_one(house):
    async def begin(asked):
        await asked.send(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc")
        asked.kill()

    await house.balance(await house.replica(begin))
    assert not (await house.ask()).is_whole


async def test_a_replica_that_is_ill_gets_nothing_until_it_is_well(house):
    ill, well = await house.replica(), await house.replica()
    balancer = await house.balance(ill, well)
    ill.health = 500
    await house.until(lambda: not balancer.targets[ill.id].is_healthy)
    for _ in range(4):
        await house.ask()
    assert (len(ill.asked), len(well.asked)) == (0, 4)
    ill.health = 200
    await house.until(lambda: balancer.targets[ill.id].is_healthy)
    for _ in range(4):
        await house.ask()
    assert len(ill.asked) == 2
    assert house.log == [
        f"replica {ill.url} answers 500 to /health",
        f"replica {ill.url} is back",
    ]


async def test_the_log_says_why_a_probe_has_failed(house):
    async def speak(reader, writer):
        writer.write(b"SSH-2.0-OpenSSH\r\n\r\n")

    refusing, other = await house.replica(), await asyncio.start_server(speak, "127.0.0.1", 0)
    refusing.stop()
    address = f"http://127.0.0.1:{other.sockets[0].getsockname()[1]}"
    await house.balance(refusing, address)
    assert house.log == [
        f"replica {refusing.url} does not answer: Connection refused; looking again",
        f"replica {address} does not answer: the answer is not HTTP/1.1; looking again",
    ]
    other.close()


async def test_a_replica_that_comes_back_on_its_port_is_found(house):
    replica = await house.replica()
    balancer = await house.balance(replica)
    replica.stop()
    await house.until(lambda: not balancer.targets[replica.id].is_healthy)
    assert (await house.ask("/ready", method="GET")).status == 503
    pending = asyncio.create_task(house.ask())
    await house.until(lambda: len(balancer.queue) == 1)
    again = await house.replica(port=replica.port)
    assert (await pending).status == 200
    assert len(again.asked) == 1
    assert (await house.ask("/ready", method="GET")).status == 200


@pytest.mark.parametrize("is_first", [True, False])
async def test_a_probe_whose_time_ends_as_its_answer_comes_breaks_no_request(
    house, monkeypatch, is_first
):
    """The connection is already another request's when the probe learns of its end."""
    on_end = health_probes._Collector.on_end

    def end_and_cancel(collector):
        if is_first:
            probe.cancel()
        on_end(collector)
        probe.cancel()

    replica = await house.replica()
    pool = ConnectionPool(parse_endpoint(replica.url), 5.0)
    monkeypatch.setattr(health_probes._Collector, "on_end", end_and_cancel)
    asked = health_probes.fetch(pool, "GET", "/health", b"Host: b\r\n", 20.0)
    probe = asyncio.create_task(asked)
    with pytest.raises(asyncio.CancelledError):
        await probe
    connection = pool.take()
    assert connection is not None
    assert not connection.is_closed
    pool.close()


async def test_a_circuit_opens_and_closes(house):
    async def moody(asked):
        if is_broken:
            asked.kill()
        else:
            await asked.answer(200, b"back")

    is_broken = True
    replica, well = await house.replica(moody), await house.replica()
    balancer = await house.balance(
        replica, well, health=HealthSettings(interval_s=60, breaker_pause_s=0.2)
    )
    for _ in range(6):
        assert (await house.ask()).status == 200
    assert balancer.targets[replica.id].breaker.num_opened >= 1
    is_broken = False
    await house.until(lambda: balancer.targets[replica.id].view.is_available)
    while (await house.ask()).body != b"back":
        pass
    assert not balancer.targets[replica.id].breaker.is_open


async def test_the_counters_add_up_and_hold_no_prompt(house):
    async def stream(asked):
        await asked.begin_stream()
        await asked.event("secret")
        await asked.end_stream()

    well, broken = await house.replica(stream), await house.replica(kill)
    await house.balance(well, broken)
    for _ in range(4):
        await house.ask(body=b'{"prompt": "secret"}')
    page = (await house.ask("/metrics", method="GET")).body.decode()
    assert "secret" not in page
    from prometheus_client.parser import text_string_to_metric_families

    values = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }
    prefix = "banaserve_route_"
    assert values[prefix + "answers_total", "200"] == 4
    assert values[prefix + "duration_seconds_count",] == 4
    # A connection that a look at its health has used may have been closed since: no fault.
    assert 0 < values[prefix + "target_broken_total", broken.id] <= len(broken.asked)
    assert values[prefix + "target_answers_total", *sorted((well.id, "200"))] == 4
    assert values[prefix + "target_outstanding", well.id] == 0


@pytest.mark.parametrize("policy", registry.names())
async def test_every_policy_gets_requests_served_over_a_failing_replica(house, policy):
    replicas = [await house.replica(lambda asked: asked.answer(200, asked.body)) for _ in range(2)]
    replicas.append(await house.replica(kill))
    for one in replicas:
        one.metrics = b"vllm:num_requests_waiting 0\nvllm:num_requests_running 1\n"
    balancer = await house.balance(*replicas, policy=PolicySettings(name=policy))
    bodies = [b'{"prompt": "the same beginning %d", "max_tokens": 4}' % i for i in range(12)]
    replies = await asyncio.gather(*(house.ask(body=body) for body in bodies))
    assert [(one.status, one.body) for one in replies] == [(200, body) for body in bodies]
    assert len(balancer.queue) == 0


@pytest.mark.parametrize("name", registry.names())
def test_a_policy_gets_what_it_reads(name):
    policy = registry.make(name, random.Random(chosen_seed(0)))
    source = inspect.getsource(inspect.getmodule(policy))
    if re.search(r"\.(pending|running|kv_used_fraction|reported_at_s)\b", source):
        assert Need.REPORTS in policy.needs
    if re.search(r"request\.(prompt|num_tokens|session|expected_output_tokens)\b", source):
        assert Need.REQUEST in policy.needs


@pytest.mark.parametrize(("policy", "is_read"), [("least_load", True), ("cache_aware", False)])
async def test_metrics_are_read_for_policies_that_need_reports(house, policy, is_read):
    replica = await house.replica(lambda asked: asked.answer())
    replica.metrics = b"vllm:num_requests_waiting 3\n"
    balancer = await house.balance(replica, policy=PolicySettings(name=policy))
    view = balancer.targets[replica.id].view
    if is_read:
        await house.until(lambda: view.pending == 3)
    looks = replica.num_looks
    await house.until(lambda: replica.num_looks >= looks + 3)
    assert (replica.num_reads > 0) == is_read
    assert view.pending == (3 if is_read else 0)
