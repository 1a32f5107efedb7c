"""Overload of the balancer, resource by resource, by clients without a key.

Each case exceeds the cap of one resource while a stream of a client with a key is under way, which
has to come to its end, and while another client with a key has to be served.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
from time import monotonic

import pytest

from banaserve_route.balancer.balancer import Balancer
from banaserve_route.balancer.config import HealthSettings, LimitSettings
from banaserve_route.balancer.http import client_connection
from connection_invariants import check_connections
from counters import counted
from slow_reading import reads_some, served_end

KEY = "Authorization: Bearer good\r\n"
POST = f"POST /v1/completions HTTP/1.1\r\nHost: b\r\n{KEY}".encode()
NUM_EVENTS = 20
LONG_S = 600.0


@pytest.fixture(autouse=True)
def time_that_passes_where_a_test_says_so(monkeypatch):
    """Limits that only a clock that jumps exceeds, on however slow a machine."""
    for name in ("HEAD_TIMEOUT_S", "UNREAD_S", "KEEP_ALIVE_S"):
        monkeypatch.setattr(client_connection, name, LONG_S)
    monkeypatch.setattr(client_connection, "BODY_BYTES_PER_S", 1000)
    monkeypatch.setattr(Balancer, "tick_slowly", lambda _: None)


class Streams:
    """A replica that streams to ``/v1/stream`` half, and the rest once it may; else echoes."""

    def __init__(self):
        self.may_go_on = asyncio.Event()

    async def __call__(self, asked):
        if " /v1/stream " not in asked.line:
            await asked.answer(200, asked.body)
            return
        await asked.begin_stream()
        for number in range(NUM_EVENTS):
            if number == NUM_EVENTS // 2:
                await self.may_go_on.wait()
            await asked.event(str(number))
        await asked.end_stream()


@contextlib.asynccontextmanager
async def known_stream(house, **limits):
    """A stream of a client with a key, which must come to its end, whatever happens meanwhile."""
    streams = Streams()
    replica = await house.replica(streams)
    balancer = await house.balance(
        replica,
        api_keys=("good",),
        limits=LimitSettings(**{"max_attempts": 1, "body_timeout_s": LONG_S, **limits}),
        health=HealthSettings(interval_s=1000.0),
    )
    house.one = replica
    caller = await house.caller()
    await caller.send(b"POST /v1/stream HTTP/1.1\r\nHost: b\r\n" + KEY.encode())
    await caller.send(b"Content-Length: 0\r\n\r\n")
    await caller.head()
    yield balancer
    assert (await house.ask(fields=KEY)).status == 200
    [target] = balancer.targets.values()
    assert (target.is_healthy, target.num_broken, target.breaker.num_opened) == (True, 0, 0)
    streams.may_go_on.set()
    body = b"".join([chunk async for chunk in caller.chunks()])
    assert body == b"".join(b"data: %d\n\n" % number for number in range(NUM_EVENTS))
    check_connections(balancer.connections)


async def is_closed(caller):
    with contextlib.suppress(ConnectionError):
        return await asyncio.wait_for(caller.reader.read(), 60) == b""
    return True


def later(balancer, seconds):
    """Let the clock of the connections jump: nothing is waited for."""
    for client in list(balancer._clients):
        client.sweep(monotonic() + seconds)


async def test_silent_connections_keep_nobody_out(house):
    async with known_stream(house, max_connections=10, max_connections_per_address=10) as balancer:
        silent = [await house.caller() for _ in range(50)]
        await house.until(lambda: counted(balancer, "dropped", cause="connections") >= 40)
        assert len(balancer.connections) <= 10
        assert await is_closed(silent[0])


@pytest.mark.one_process
async def test_one_address_takes_no_place_of_another(house):
    async with known_stream(house, max_connections=40, max_connections_per_address=4) as balancer:
        other = await asyncio.open_connection("127.0.0.1", house.port, local_addr=("127.0.0.2", 0))
        await house.until(lambda: len(balancer.connections) == 2)
        many = [await house.caller() for _ in range(20)]
        for one in many[:16]:
            assert await is_closed(one)
        await house.until(lambda: len(balancer.connections) == 6)
        other[1].write(POST + b"Content-Length: 2\r\n\r\n{}")
        assert b" 200 " in await asyncio.wait_for(other[0].readuntil(b"\r\n"), 60)
        other[1].transport.abort()


async def test_a_new_connection_is_refused_where_all_others_have_shown_a_key(house):
    replica = await house.replica()
    await house.balance(replica, api_keys=("good",), limits=LimitSettings(max_connections=2))
    kept = [await house.caller() for _ in range(1)]
    assert (await kept[0].ask(fields=KEY)).status == 200
    kept.append(await house.caller())
    assert (await kept[1].ask(fields=KEY)).status == 200
    late = await house.caller()
    reply = await late.reply()
    assert (reply.status, reply.fields["retry-after"]) == (503, "1")
    assert await is_closed(late)
    await house.until(lambda: len(house.balancer.connections) == 2)
    for one in kept:
        assert (await one.ask(fields=KEY)).status == 200


@pytest.mark.one_process
async def test_a_head_has_its_time_and_silence_too(house):
    async with known_stream(house) as balancer:
        half, silent = await house.caller(), await house.caller()
        await half.send(b"GET /v1/mod")
        await house.until(lambda: any(one._head_bytes for one in balancer._clients))
        await house.until(lambda: len(balancer.connections) == 3)
        later(balancer, LONG_S / 2)
        assert len(balancer.connections) == 3
        later(balancer, LONG_S + 1)
        assert (await half.reply()).status == 408
        assert await is_closed(silent)


async def test_heads_are_bounded(house):
    async with known_stream(house):
        for sent in (b"X: " + b"a" * 40_000, b"a: b\r\n" * 200):
            caller = await house.caller()
            await caller.send(b"POST /v1/completions HTTP/1.1\r\nHost: b\r\n" + sent)
            assert (await caller.reply()).status == 431


async def test_a_browser_asks_without_a_key_and_is_not_known_for_it(house):
    replica = await house.replica()
    told = LimitSettings(max_connections=1)
    await house.balance(replica, api_keys=("good",), limits=told)
    caller = await house.caller()
    preflight = b"OPTIONS /v1/chat/completions HTTP/1.1\r\nHost: b\r\n"
    await caller.send(preflight + b"Access-Control-Request-Method: POST\r\n\r\n")
    assert (await caller.reply()).status == 200
    [asked] = replica.asked
    assert asked.field("access-control-request-method") == "POST"
    other = await house.caller()  # takes the place of the one that has shown no key
    assert await is_closed(caller)
    await other.send(preflight + b"Content-Length: 1\r\n\r\nx")
    assert (await other.reply()).status == 401


async def test_a_browser_s_question_does_not_wait(house):
    go_on = asyncio.Event()

    async def hold(asked):
        await go_on.wait()
        await asked.answer()

    replica = await house.replica(hold)
    limits = LimitSettings(max_outstanding=1)
    balancer = await house.balance(replica, api_keys=("good",), limits=limits)
    fields = "Authorization: Bearer good\r\n"
    asking = [asyncio.create_task(house.ask(fields=fields)) for _ in range(2)]
    await house.until(lambda: len(balancer.queue) == 1)
    caller = await house.caller()
    await caller.send(b"OPTIONS /v1/chat/completions HTTP/1.1\r\nHost: b\r\n\r\n")
    refused = await caller.reply()
    assert (refused.status, refused.fields["retry-after"]) == (503, "2")
    assert len(balancer.queue) == 1
    go_on.set()
    assert [(await one).status for one in asking] == [200, 200]


async def test_bodies_without_a_key_take_no_places(house):
    async with known_stream(
        house, max_requests=3, max_buffered="4KiB", max_body="1KiB"
    ) as balancer:
        for _ in range(10):
            caller = await house.caller()
            await caller.send(
                b"POST /v1/completions HTTP/1.1\r\nHost: b\r\nContent-Length: 1000\r\n\r\nx"
            )
            assert (await caller.reply()).status == 401
        assert balancer.buffered_bytes == 0


@pytest.mark.one_process
async def test_a_body_has_its_time_in_all_however_it_trickles(house, monkeypatch):
    passed_s = 0.0
    monkeypatch.setattr(client_connection, "monotonic", lambda: monotonic() + passed_s)
    async with known_stream(house) as balancer:
        slow, steady = await house.caller(), await house.caller()
        half = b"a" * 500_000
        await steady.send(POST + b"Content-Length: 1000000\r\n\r\n" + half)
        await slow.send(POST + b"Content-Length: 1000000\r\n\r\n")
        for number in range(10):
            await house.until(lambda: balancer.buffered_bytes == 500_000 + number)  # noqa: B023
            later(balancer, passed_s)
            passed_s += LONG_S / 10
            await slow.send(b"a")
        await house.until(lambda: balancer.buffered_bytes == 500_010)
        later(balancer, LONG_S + 100)
        assert (await slow.reply()).status == 408
        await steady.send(half)
        assert (await steady.reply()).body == half + half


@pytest.mark.one_process
async def test_a_client_that_never_reads_is_dropped_in_mid_answer(house):
    large = b"x" * (64 * 2**20)  # more than all buffers of the kernel can hold

    async def behave(asked):
        await asked.answer(200, large)

    replica = await house.replica(behave)
    balancer = await house.balance(replica, api_keys=("good",))
    deaf, slow = await house.caller(), await house.caller()
    for one in (deaf, slow):
        one.writer.transport.pause_reading()
        await one.send(POST + b"Content-Length: 2\r\n\r\n{}")
    await house.until(lambda: sum(one._is_choked for one in balancer._clients) == 2)
    body, seconds = 0, 0.0
    served = served_end((one._transport for one in balancer._clients), slow.writer)
    while len(balancer.connections) == 2:
        body += await reads_some(slow.reader, slow.writer, served)
        seconds += LONG_S / 3
        later(balancer, seconds)
    assert seconds >= LONG_S
    assert counted(balancer, "dropped", cause="unread") == 1
    slow.writer.transport.resume_reading()
    while body < len(large):
        part = await asyncio.wait_for(slow.reader.read(2**20), 60)
        assert part, "the slow reader was dropped"
        body += len(part)


async def test_refusals_are_logged_once_a_second(house, monkeypatch):
    async with known_stream(house) as balancer:
        monkeypatch.setattr(balancer._refusal_log, "_clock", lambda: 1e12)
        for _ in range(5):
            assert (await house.ask()).status == 401
        assert sum("refused (401)" in line for line in house.log) == 1
        assert counted(balancer, "refused", status="401") == 5


@contextlib.contextmanager
def no_descriptors_left():
    """Nothing can be opened in this process, whatever is closed meanwhile; what is open goes on.

    A new descriptor has a number below the limit, and those below three are never closed.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.one_process
async def test_a_lack_of_descriptors_is_no_fault_of_a_replica(house):
    async with known_stream(house, max_attempts=2) as balancer:
        [target] = balancer.targets.values()
        callers = [await house.caller() for _ in range(5)]
        await house.until(lambda: len(balancer.connections) == 6)
        prober = balancer.registry._probers[target.view.id]
        target.pool.drop_idle()
        await house.until(lambda: len(house.one._writers) == 1)
        with no_descriptors_left():
            for caller in callers:
                reply = await caller.ask(fields=KEY)
                assert reply.status == 503
                assert "the balancer cannot connect" in reply.json["error"]["message"]
            for _ in range(4):
                await prober.look()
        assert (target.is_healthy, target.num_failed_looks, target.num_broken) == (True, 0, 0)
        assert sum("this balancer itself" in line for line in house.log) >= 1


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"POST /v1/x HTTP/1.0\r\nTransfer-Encoding: chunked\r\n%b\r\n0\r\n\r\n", 400),
        (b"POST /v1/x HTTP/1.0\r\nContent-Length: 0\r\n%b\r\n", 200),
    ],
)
async def test_an_old_version_frames_no_chunks(house, sent, status):
    replica = await house.replica()
    await house.balance(replica, api_keys=("good",))
    caller = await house.caller()
    await caller.send(sent % KEY.encode() + b"GET /v1/smuggled HTTP/1.1\r\nHost: b\r\n\r\n")
    reply = await caller.reply()
    assert reply.status == status
    assert await is_closed(caller)
    assert len(replica.asked) == (status == 200)
