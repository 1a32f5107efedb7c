"""Requests through a balancer: what passes, what waits, what ends."""

from __future__ import annotations

import asyncio
import hashlib

import pytest

from banaserve_route.balancer.config import LimitSettings, ReplicaSettings
from banaserve_route.balancer.http.replica_connection import ReplicaConnection


async def test_a_request_and_its_answer_pass_unchanged(house):
    replica = await house.replica(lambda asked: asked.answer(201, b'{"a":1}', "X-Own: yes\r\n"))
    await house.balance(replica)
    reply = await house.ask(
        "/v1/completions?x=%20y",
        b'{"prompt": "caf\xc3\xa9"}',
        "X-Custom: 1\r\nAuthorization: Bearer k\r\nKeep-Alive: 5\r\nTE: trailers\r\n"
        "Connection: keep-alive, x-hop\r\nX-Hop: secret\r\n",
    )
    assert (reply.status, reply.body, reply.fields["x-own"]) == (201, b'{"a":1}', "yes")
    asked = replica.asked[0]
    assert asked.line == "POST /v1/completions?x=%20y HTTP/1.1"
    assert asked.body == b'{"prompt": "caf\xc3\xa9"}'
    assert asked.field("host") == replica.id
    assert asked.field("authorization") == "Bearer k"
    names = {name.lower() for name, _ in asked.fields}
    assert names == {"host", "authorization", "x-custom", "content-length"}


async def test_a_chunked_body_goes_on_with_its_length(house):
    replica = await house.replica()
    await house.balance(replica)
    caller = await house.caller()
    await caller.send(
        b"POST /v1/completions HTTP/1.1\r\nHost: b\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"3\r\nabc\r\n2\r\nde\r\n0\r\nX-Session-Id: 9\r\n\r\n"
    )
    assert (await caller.reply()).status == 200
    assert replica.asked[0].body == b"abcde"
    assert replica.asked[0].field("transfer-encoding") is None
    assert replica.asked[0].field("x-session-id") is None


async def test_what_a_client_asks_of_the_server_in_fields_goes_on(house):
    replica = await house.replica()
    await house.balance(replica)
    caller = await house.caller()
    await caller.send(
        b"POST /v1/completions HTTP/1.1\r\nHost: b\r\nContent-Length: 0\r\n"
        b"X-Banaserve-Keep: 60\r\nX-Banaserve-SLO-TTFT: 2\r\nX-Banaserve-Other: 1\r\n\r\n"
    )
    assert (await caller.reply()).status == 200
    [asked] = replica.asked
    assert (asked.field("x-banaserve-keep"), asked.field("x-banaserve-slo-ttft")) == ("60", "2")
    assert asked.field("x-banaserve-other") is None


async def test_each_event_of_a_stream_comes_before_the_next_is_made(house):
    go_on = asyncio.Event()

    async def stream(asked):
        await asked.begin_stream()
        await asked.event("one")
        await go_on.wait()
        await asked.event("two")
        await asked.end_stream()

    await house.balance(await house.replica(stream))
    caller = await house.caller()
    for _ in range(2):
        go_on.clear()
        await caller.send(b"POST /v1/completions HTTP/1.1\r\nHost: b\r\nContent-Length: 0\r\n\r\n")
        status, fields = await caller.head()
        assert (status, fields["transfer-encoding"]) == (200, "chunked")
        chunks = caller.chunks()
        assert await anext(chunks) == b"data: one\n\n"
        go_on.set()
        assert [one async for one in chunks] == [b"data: two\n\n"]


async def test_a_comment_is_relayed_at_once_and_is_no_first_token(house):
    go_on = asyncio.Event()
    comment = b": keep-alive\n\n"

    async def stream(asked):
        await asked.begin_stream()
        for _ in range(2):
            await asked.send(b"%x\r\n%b\r\n" % (len(comment), comment))
            await go_on.wait()
            go_on.clear()
        await asked.event("one")
        await go_on.wait()
        await asked.end_stream()

    balancer = await house.balance(await house.replica(stream))
    [target] = balancer.targets.values()
    caller = await house.caller()
    await caller.send(b"POST /v1/completions HTTP/1.1\r\nHost: b\r\nContent-Length: 0\r\n\r\n")
    await caller.head()
    chunks = caller.chunks()
    [request] = balancer._under_way
    for _ in range(2):
        assert await anext(chunks) == comment
        await house.until(lambda: request.status == 200)
        assert target.view.prefilling == 1
        go_on.set()
    assert await anext(chunks) == b"data: one\n\n"
    await house.until(lambda: target.view.prefilling == 0)
    assert target.view.outstanding == 1
    go_on.set()
    assert [one async for one in chunks] == []


@pytest.mark.parametrize(
    ("place", "told"),
    [
        ("OWN/v1/models?a=http://OWN/", "/v1/models?a=http://OWN/"),
        ("OWN", "OWN"),
        ("OWN//other/v1", "OWN//other/v1"),
        ("OWN0/v1/models", "OWN0/v1/models"),
        ("https://OWN/v1/models", "https://OWN/v1/models"),
        ("http://127.0.0.1/v1/models", "http://127.0.0.1/v1/models"),
    ],
)
async def test_a_redirect_of_a_replica_to_itself_leads_to_the_balancer(house, place, told):
    """As FastAPI redirects from ``/v1/models/``, by the Host header that the replica was sent."""

    def at(replica, place):
        return place.replace("://OWN", f"://{replica.id}").replace("OWN", replica.url)

    async def redirect(asked):
        await asked.answer(307, b"", f"location: {at(replica, place)}\r\n")

    replica = await house.replica(redirect)
    await house.balance(replica)
    reply = await house.ask("/v1/models/", method="GET")
    assert (reply.status, reply.fields["location"]) == (307, at(replica, told))


async def test_connections_are_used_again_on_both_sides(house):
    replica = await house.replica()
    await house.balance(replica)
    caller = await house.caller()
    before = replica.num_connections
    for _ in range(5):
        assert (await caller.ask()).status == 200
    assert replica.num_connections <= before + 1


async def test_requests_sent_at_once_are_answered_in_their_order(house):
    replica = await house.replica(lambda asked: asked.answer(200, asked.body))
    await house.balance(replica, replica_key="k")
    caller = await house.caller()
    await caller.send(
        b"".join(
            b"POST /v1/completions HTTP/1.1\r\nHost: b\r\nContent-Length: 1\r\n\r\n%d" % i
            for i in range(8)
        )
    )
    assert [(await caller.reply()).body for _ in range(8)] == [b"%d" % i for i in range(8)]
    assert replica.asked[0].field("authorization") == "Bearer k"


async def test_a_client_that_goes_away_cancels_its_request(house):
    gone = asyncio.Event()

    async def hold(asked):
        await asked.begin_stream()
        await asked.event("one")
        await asked.until_gone()
        gone.set()

    balancer = await house.balance(await house.replica(hold))
    caller = await house.caller()
    await caller.send(b"POST /v1/completions HTTP/1.1\r\nHost: b\r\nContent-Length: 0\r\n\r\n")
    assert await anext(aiter_chunks(caller)) == b"data: one\n\n"
    caller.hang_up()
    await asyncio.wait_for(gone.wait(), 60)
    await house.until(lambda: not balancer.fleet._flights)


async def aiter_chunks(caller):
    await caller.head()
    async for chunk in caller.chunks():
        yield chunk


async def test_an_answer_without_a_length_ends_with_the_connection(house):
    async def plain(asked):
        await asked.send(b"HTTP/1.1 200 OK\r\nX-A: 1\r\n\r\nabc")
        asked.writer.close()

    await house.balance(await house.replica(plain))
    reply = await house.ask()
    assert (reply.body, reply.fields["connection"]) == (b"abc", "close")


@pytest.mark.one_process
async def test_a_client_that_does_not_read_holds_its_replica_up_and_nothing_is_lost(
    house, monkeypatch
):
    paused = asyncio.Event()
    pause = ReplicaConnection.pause

    def noted(upstream):
        pause(upstream)
        paused.set()

    monkeypatch.setattr(ReplicaConnection, "pause", noted)
    block, num_blocks = bytes(range(256)) * 256, 600

    async def much(asked):
        await asked.send(
            b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (len(block) * num_blocks)
        )
        for _ in range(num_blocks):
            await asked.send(block)

    await house.balance(await house.replica(much))
    caller = await house.caller()
    await caller.send(b"GET /v1/models HTTP/1.1\r\nHost: b\r\n\r\n")
    await asyncio.wait_for(paused.wait(), 60)
    reply = await caller.reply()
    assert hashlib.sha256(reply.body).digest() == hashlib.sha256(block * num_blocks).digest()
    assert (await caller.ask()).status == 200


async def test_a_request_waits_for_its_turn_and_no_longer_than_it_may(house):
    go_on = asyncio.Event()

    async def hold(asked):
        if b"first" in asked.body:
            await go_on.wait()
        await asked.answer(200, asked.body)

    replica = await house.replica(hold)
    balancer = await house.balance(replica, limits=LimitSettings(max_outstanding=1, max_queue=2))
    first = asyncio.create_task(house.ask(body=b"first"))
    await house.until(lambda: replica.asked)
    waiting = [asyncio.create_task(house.ask(body=b"late")) for _ in range(2)]
    await house.until(lambda: len(balancer.queue) == 2)
    refused = await house.ask(body=b"too many")
    assert (refused.status, refused.fields["retry-after"]) == (429, "1")
    for exchange in list(balancer._under_way)[1:]:
        exchange.waits_until_s = 0.0
    assert [(await one).status for one in waiting] == [503, 503]
    second = asyncio.create_task(house.ask(body=b"second"))
    await house.until(lambda: len(balancer.queue) == 1)
    go_on.set()
    assert [(await one).body for one in (first, second)] == [b"first", b"second"]
    assert len(replica.asked) == 2


async def test_a_long_prompt_in_line_holds_no_short_one_up(house):
    go_on = asyncio.Event()

    async def hold(asked):
        await go_on.wait()
        await asked.answer()

    large, small = await house.replica(hold), await house.replica()
    balancer = await house.balance(
        ReplicaSettings(url=large.url, max_outstanding=1),
        ReplicaSettings(url=small.url, max_prompt_tokens=10),
    )
    asking = [asyncio.create_task(house.ask(body=bytes(100))) for _ in range(2)]
    await house.until(lambda: len(balancer.queue) == 1)
    assert (await house.ask(body=b"short")).status == 200
    assert len(balancer.queue) == len(small.asked) == 1
    go_on.set()
    assert [(await one).status for one in asking] == [200, 200]


async def test_who_hangs_up_in_line_is_never_sent(house):
    go_on = asyncio.Event()

    async def hold(asked):
        await go_on.wait()
        await asked.answer()

    replica = await house.replica(hold)
    balancer = await house.balance(replica, limits=LimitSettings(max_outstanding=1))
    first = asyncio.create_task(house.ask())
    await house.until(lambda: replica.asked)
    caller = await house.caller()
    await caller.send(b"POST /v1/completions HTTP/1.1\r\nHost: b\r\nContent-Length: 0\r\n\r\n")
    await house.until(lambda: len(balancer.queue) == 1)
    caller.hang_up()
    await house.until(lambda: len(balancer.queue) == 0)
    go_on.set()
    assert (await first).status == 200
    assert (await house.ask()).status == 200
    assert len(replica.asked) == 2


async def test_a_request_out_of_time_is_answered_and_cancelled(house):
    gone = asyncio.Event()

    async def never(asked):
        await asked.until_gone()
        gone.set()

    replica = await house.replica(never)
    balancer = await house.balance(replica)
    asking = asyncio.create_task(house.ask())
    await house.until(lambda: replica.asked)
    for exchange in balancer._under_way:
        exchange.deadline_s = 0.0
    assert (await asking).status == 504
    await asyncio.wait_for(gone.wait(), 60)


async def test_keys_are_needed_and_stay_here(house):
    replica = await house.replica()
    own = await house.replica()
    await house.balance(replica, ReplicaSettings(url=own.url, key="own"), api_keys=("k1", "k2"))
    for wrong in ("", "Authorization: Bearer k3\r\n", "Authorization: Basic k1\r\n"):
        reply = await house.ask(fields=wrong)
        assert (reply.status, reply.fields["www-authenticate"]) == (401, "bearer")
    assert (await house.ask("/health", method="GET", body=b"")).status == 200
    for key in ("k1", "k2"):
        assert (await house.ask(fields=f"Authorization: Bearer {key}\r\n")).status == 200
    assert [one.field("authorization") for one in replica.asked + own.asked] == [None, "Bearer own"]


async def test_a_client_may_ask_before_it_sends_a_body(house):
    replica = await house.replica(lambda asked: asked.answer(200, asked.body))
    await house.balance(replica)
    caller = await house.caller()
    await caller.send(
        b"POST /v1/completions HTTP/1.1\r\nHost: b\r\nContent-Length: 3\r\n"
        b"Expect: 100-continue\r\n\r\n"
    )
    assert (await caller.head())[0] == 100
    await caller.send(b"abc")
    assert (await caller.reply()).body == b"abc"


async def test_a_client_of_http_10_gets_its_answer_and_the_end(house):
    replica = await house.replica()
    await house.balance(replica)
    caller = await house.caller()
    await caller.send(b"GET /v1/models HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
    reply = await caller.reply()
    assert (reply.status, reply.fields["connection"]) == (200, "close")
    assert await caller.reader.read() == b""
    assert replica.asked[0].line == "GET /v1/models HTTP/1.1"


@pytest.mark.parametrize("path", ["/health", "/v1/models"])
async def test_no_connection_of_a_client_of_http_10_persists(house, path):
    await house.balance(await house.replica())
    caller = await house.caller()
    await caller.send(b"GET %b HTTP/1.0\r\nConnection: keep-alive\r\n\r\n" % path.encode())
    assert (await caller.reply()).fields["connection"] == "close"
    assert await caller.reader.read() == b""


@pytest.mark.parametrize("is_whole", [True, False])
async def test_a_client_of_http_10_gets_a_stream_without_chunks(house, is_whole):
    async def stream(asked):
        await asked.begin_stream()
        for number in range(3):
            await asked.event(f"{number}")
        await (asked.end_stream() if is_whole else asked.until_gone())

    replica = await house.replica(stream)
    balancer = await house.balance(replica)
    caller = await house.caller()
    await caller.send(b"POST /v1/completions HTTP/1.0\r\nContent-Length: 2\r\n\r\n{}")
    status, fields = await caller.head()
    assert (status, fields["connection"]) == (200, "close")
    assert "transfer-encoding" not in fields
    body = b"".join(b"data: %d\n\n" % number for number in range(3))
    assert await caller.reader.readexactly(len(body)) == body
    if is_whole:
        assert await caller.reader.read() == b""
    else:
        replica.stop()
        with pytest.raises(ConnectionResetError):
            await caller.reader.read()
    [target] = balancer.targets.values()
    assert target.breaker.num_opened == 0


async def test_an_answer_to_head_has_no_body(house):
    await house.balance(
        await house.replica(
            lambda asked: asked.send(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n")
        )
    )
    caller = await house.caller()
    for _ in range(2):
        reply = await caller.ask("/v1/models", method="HEAD", body=b"")
        assert reply.fields["content-length"] == "5"
        assert (await caller.ask("/health", method="HEAD", body=b"")).status == 200


@pytest.mark.one_process
async def test_requests_under_way_finish_when_the_balancer_leaves(house):
    go_on = asyncio.Event()

    async def hold(asked):
        await go_on.wait()
        await asked.answer(200, b"whole")

    replica = await house.replica(hold)
    balancer = await house.balance(replica)
    idle = await house.caller()
    pending = asyncio.create_task(house.ask())
    await house.until(lambda: replica.asked)
    balancer.leave()
    assert await idle.reader.read() == b""
    ended = asyncio.create_task(balancer.idle())
    go_on.set()
    reply = await pending
    assert (reply.body, reply.fields["connection"]) == (b"whole", "close")
    await asyncio.wait_for(ended, 60)
