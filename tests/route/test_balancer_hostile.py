"""Bytes that nobody should send, from clients and from replicas."""

from __future__ import annotations

import asyncio

import pytest

from banaserve_route.balancer.config import LimitSettings

POST = b"POST /v1/completions HTTP/1.1\r\nHost: b\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"

REFUSED = [
    # Two ends of one body.
    (POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    (POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n", 400),
    (POST + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc", 400),
    (POST + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd", 400),
    (POST + b"Content-Length: 3, 3\r\n\r\nabc", 400),
    (POST + b"Content-Length: +3\r\n\r\nabc", 400),
    (POST + b"Content-Length: -1\r\n\r\n", 400),
    (POST + b"Content-Length: 0x3\r\n\r\nabc", 400),
    (POST + b"Content-Length: 99999999999999999999\r\n\r\n", 400),
    (POST + b"Content-Length : 3\r\n\r\nabc", 400),
    (POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
    (POST + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n", 400),
    (POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", 501),
    (POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    (POST + b"Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n", 400),
    (POST + b"X: a\r\n folded: b\r\n\r\n", 400),
    # Chunks.
    (CHUNKED + b"x\r\n", 400),
    (CHUNKED + b"0x1\r\na\r\n0\r\n\r\n", 400),
    (CHUNKED + b"-1\r\na\r\n0\r\n\r\n", 400),
    (CHUNKED + b"1\na\r\n0\r\n\r\n", 400),
    (CHUNKED + b"FFFFFFFFFFFFFFFFFFFF\r\na\r\n0\r\n\r\n", 400),
    (CHUNKED + b"1\r\nabc\r\n0\r\n\r\n", 400),
    # Heads.
    (b"GET /v1/models HTTP/1.1\nHost: b\n\n", 400),
    (b"GET /v1/models HTTP/1.1\r\n\r\n", 400),
    (b"GET /v1/models HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
    (b"GET /v1/models HTTP/1.1\r\n Host: b\r\n\r\n", 400),
    (b"GET /v1/models HTTP/1.1\r\nHost: b\r\nX: a\0b\r\n\r\n", 400),
    (b"GET /v1/models HTTP/1.1\r\nHost: b\r\nX: a\rY: b\r\n\r\n", 400),
    (b"GET /v1/models HTTP/2.0\r\nHost: b\r\n\r\n", 505),
    (b"GET /v1/models HTTP/0.9\r\nHost: b\r\n\r\n", 505),
    (b"FROB /v1/models HTTP/1.1\r\nHost: b\r\n\r\n", 400),
    (b"CONNECT b:80 HTTP/1.1\r\nHost: b\r\n\r\n", 405),
    (b"TRACE /v1/models HTTP/1.1\r\nHost: b\r\n\r\n", 405),
    (b"GET http://c\\v1/models HTTP/1.1\r\nHost: b\r\n\r\n", 400),
    (b"GET ftp://c/v1/models HTTP/1.1\r\nHost: b\r\n\r\n", 400),
    (b"OPTIONS * HTTP/1.1\r\nHost: b\r\n\r\n", 400),
    (
        b"GET /v1/x HTTP/1.1\r\nHost: b\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
        501,
    ),
    (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    (POST + b"Authorization: Bearer a\r\nAuthorization: Bearer b\r\n\r\n", 400),
    (POST + b"Expect: coffee\r\nContent-Length: 0\r\n\r\n", 417),
    # Sizes.
    (b"GET /" + b"a" * 40_000, 431),
    (POST + b"X: " + b"a" * 40_000 + b"\r\n\r\n", 431),
    (POST + b"".join(b"X-%d: a\r\n" % i for i in range(200)) + b"\r\n", 431),
    (POST + b"Content-Length: 1001\r\n\r\n", 413),
    (CHUNKED + b"3e9\r\n" + b"a" * 1001 + b"\r\n", 413),
    # Paths that a replica might read otherwise.
    (b"GET /admin HTTP/1.1\r\nHost: b\r\n\r\n", 404),
    (b"GET /v1/../admin HTTP/1.1\r\nHost: b\r\n\r\n", 400),
    (b"GET /v1/%2e%2e/admin HTTP/1.1\r\nHost: b\r\n\r\n", 400),
    (b"GET /v1/..%2fadmin HTTP/1.1\r\nHost: b\r\n\r\n", 400),
    (b"GET /v1//admin HTTP/1.1\r\nHost: b\r\n\r\n", 400),
    (b"GET /v1/x%00 HTTP/1.1\r\nHost: b\r\n\r\n", 400),
    (b"GET /v1/x%5cy HTTP/1.1\r\nHost: b\r\n\r\n", 400),
    (b"POST /v1/load_lora_adapter HTTP/1.1\r\nHost: b\r\nContent-Length: 0\r\n\r\n", 404),
    (b"POST /v1/load%5flora_adapter HTTP/1.1\r\nHost: b\r\nContent-Length: 0\r\n\r\n", 404),
    (b"POST /sleep HTTP/1.1\r\nHost: b\r\nContent-Length: 0\r\n\r\n", 404),
]


@pytest.fixture
async def small(house):
    house.one = await house.replica()
    await house.balance(house.one, limits=LimitSettings(max_body="1000B"))
    return house


async def test_what_is_refused_is_refused_in_one_line_and_reaches_nobody(small):
    """One balancer for all of them: what one of them leaves behind, the next would find."""
    for sent, status in REFUSED:
        for is_cut in (False, True):
            caller = await small.caller()
            if is_cut:
                await caller.send(sent[: len(sent) // 2])
                await asyncio.sleep(0)
            await caller.send(sent[len(sent) // 2 :] if is_cut else sent)
            # What follows must never be taken for a request.
            await caller.send(b"GET /v1/smuggled HTTP/1.1\r\nHost: b\r\n\r\n")
            reply = await caller.reply()
            assert reply.status == status, sent[:200]
            message = reply.json["error"]["message"]
            assert message, sent[:200]
            assert "\n" not in message
            assert reply.fields["connection"] == "close"
            assert await caller.reader.read() == b""
            caller.hang_up()
    assert small.one.asked == []
    assert (await small.ask()).status == 200


@pytest.mark.parametrize("at_a_time", [1, 7, 1000])
async def test_an_offer_of_http_2_is_ignored(small, at_a_time):
    """Java's client makes one; each request then has a connection of its own."""
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n"
    for sent in (
        b"GET /v1/models HTTP/1.1\r\nHost: b\r\n" + offer + b"\r\n",
        POST + offer + b"Content-Length: 5\r\n\r\nabcde",
        POST + offer + b"Transfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n0\r\n\r\n",
        POST + b"Upgrade: h2c\r\nConnection: close\r\nContent-Length: 5\r\n\r\nabcde",
    ):
        caller = await small.caller()
        sent += b"GET /v1/smuggled HTTP/1.1\r\nHost: b\r\n\r\n"
        for at in range(0, len(sent), at_a_time):
            await caller.send(sent[at : at + at_a_time])
            await asyncio.sleep(0)
        reply = await caller.reply()
        assert (reply.status, reply.fields["connection"]) == (200, "close")
        assert "upgrade" not in reply.fields
        assert await caller.reader.read() == b""
    assert [one.body for one in small.one.asked] == [b"", *[b"abcde"] * 3]
    for asked in small.one.asked:
        assert not {"upgrade", "http2-settings"} & {*asked.fields}


@pytest.mark.parametrize("at_a_time", [1, 7])
async def test_a_request_may_come_in_drops(small, at_a_time):
    caller = await small.caller()
    sent = POST + b"Transfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n1\r\nf\r\n0\r\n\r\n"
    for at in range(0, len(sent), at_a_time):
        await caller.send(sent[at : at + at_a_time])
        await asyncio.sleep(0)
    assert (await caller.reply()).status == 200
    assert small.one.asked[0].body == b"abcdef"


@pytest.mark.one_process
async def test_who_sends_too_slowly_is_told_and_let_go(small):
    clients = small.balancer._clients
    caller = await small.caller()
    await caller.send(b"GET /v1/mod")
    await small.until(lambda: any(one._head_bytes for one in clients))
    silent = await small.caller()
    await small.until(lambda: len(clients) == 2)
    for client in clients:
        assert client._closes_at_s > 0
        client._closes_at_s = 1e-9
    assert (await caller.reply()).status == 408
    assert await silent.reader.read() == b""


@pytest.mark.one_process
async def test_bodies_in_memory_are_bounded_all_together(house):
    replica = await house.replica()
    balancer = await house.balance(replica, limits=LimitSettings(max_buffered="1000B"))
    caller = await house.caller()
    await caller.send(POST + b"Content-Length: 900\r\n\r\n" + b"a" * 800)
    await house.until(lambda: balancer.buffered_bytes == 800)
    refused = await house.ask(body=b"a" * 201)
    assert (refused.status, refused.fields["retry-after"]) == (503, "1")
    await caller.send(b"a" * 100)
    assert (await caller.reply()).status == 200
    assert (await house.ask(body=b"a" * 900)).status == 200


async def test_too_many_at_once_are_refused(house):
    go_on = asyncio.Event()

    async def hold(asked):
        await go_on.wait()
        await asked.answer()

    replica = await house.replica(hold)
    await house.balance(replica, limits=LimitSettings(max_requests=1))
    first = asyncio.create_task(house.ask())
    await house.until(lambda: replica.asked)
    second = await house.ask()
    assert (second.status, second.fields["retry-after"]) == (429, "1")
    go_on.set()
    assert (await first).status == 200


@pytest.mark.parametrize(
    "garbage",
    [
        b"garbage\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 3\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nA: 1\r\n b: 2\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * 70_000,
        b"\0" * 70_000,
    ],
)
async def test_an_answer_that_is_none_is_the_replica_s_fault(house, garbage):
    bad, well = await house.replica(lambda asked: asked.send(garbage)), await house.replica()
    balancer = await house.balance(bad, well)
    for _ in range(4):
        reply = await house.ask()
        assert (reply.status, reply.body) == (200, b"{}")
    assert balancer.targets[bad.id].num_broken == len(bad.asked) > 0


async def test_bytes_after_an_answer_are_never_the_next_answer(house):
    smuggled = b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\nsmuggled"

    async def twice(asked):
        await asked.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok" + smuggled)

    balancer = await house.balance(await house.replica(twice))
    caller = await house.caller()
    for _ in range(3):
        assert (await caller.ask()).body == b"ok"
    assert sum(one.num_broken for one in balancer.targets.values()) == 0


async def test_interim_answers_are_left_out(house):
    hints = b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
    await house.balance(
        await house.replica(
            lambda asked: asked.send(hints + b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        )
    )
    assert (await house.ask()).status == 200
