"""Stored responses, each in the memory of one replica: found behind a balancer, or refused."""

from __future__ import annotations

import json

import pytest

from banaserve_route.balancer.config import LimitSettings, PolicySettings, ReplicaSettings
from banaserve_route.balancer.http.request import ClientRequest
from banaserve_route.balancer.requests.routing_request import stored_response

NOT_FOUND = b'{"error":{"message":"Response with id \'...\' not found."}}'


def holding(*response_ids):
    """What a replica does that holds these responses: as vLLM's."""

    async def behave(asked):
        method, path, _ = asked.line.split()
        if not path.startswith("/v1/responses"):
            await asked.answer()
            return
        if path == "/v1/responses":
            wanted = json.loads(asked.body).get("previous_response_id")
        else:
            wanted = path.split("?")[0].split("/")[3]
        if wanted is None or wanted in response_ids:
            await asked.answer(200, f"{method} {path}".encode())
        else:
            await asked.answer(404, NOT_FOUND)

    return behave


def ask_for(house, way, response_id="resp_a"):
    if way == "go on":
        body = json.dumps({"input": "more", "previous_response_id": response_id}).encode()
        return house.ask("/v1/responses", body)
    method, ending = {
        "show": ("GET", ""),
        "follow": ("GET", "?stream=true&starting_after=3"),
        "cancel": ("POST", "/cancel"),
        "delete": ("DELETE", ""),
    }[way]
    return house.ask(f"/v1/responses/{response_id}{ending}", b"", method=method)


WAYS = ["go on", "show", "follow", "cancel", "delete"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("policy", ["round_robin", "least_requests", "skywalker"])
async def test_a_stored_response_is_found_at_the_replica_that_holds_it(house, way, policy):
    replicas = [await house.replica(holding()) for _ in range(5)]
    holder = await house.replica(holding("resp_a"))
    await house.balance(*replicas, holder, policy=PolicySettings(name=policy))
    for number in range(1, 7):
        assert (await ask_for(house, way)).status == 200
        assert len(holder.asked) == number
    assert all(len(one.asked) <= 6 for one in replicas)


@pytest.mark.parametrize("way", WAYS)
async def test_one_that_no_replica_holds_is_refused_in_their_words(house, way):
    replicas = [await house.replica(holding("resp_b")) for _ in range(4)]
    await house.balance(*replicas)
    reply = await ask_for(house, way)
    assert (reply.status, reply.body) == (404, NOT_FOUND)
    assert [len(one.asked) for one in replicas] == [1, 1, 1, 1]


@pytest.mark.parametrize("way", WAYS)
async def test_one_of_a_replica_that_is_gone_is_refused_at_once(house, way):
    replica, holder = await house.replica(holding()), await house.replica(holding("resp_a"))
    balancer = await house.balance(replica, holder)
    assert (await ask_for(house, way)).status == 200
    holder.stop()
    await house.until(lambda: not all(one.is_healthy for one in balancer.targets.values()))
    reply = await ask_for(house, way)
    message = reply.json["error"]["message"]
    assert reply.status == 404
    assert "'resp_a'" in message
    assert f"replica {holder.url} cannot be asked, and what it held may be lost" in message
    assert (await house.ask("/v1/responses", b'{"input": "new"}')).status == 200


async def test_one_of_a_replica_that_breaks_off_is_refused_at_once(house):
    async def kill(asked):
        asked.kill()

    replica, broken = await house.replica(holding()), await house.replica(kill)
    await house.balance(replica, broken, limits=LimitSettings(max_attempts=9))
    for way in WAYS:
        reply = await ask_for(house, way)
        assert reply.status == 404
        assert f"replica {broken.url}" in reply.json["error"]["message"]


async def test_one_of_a_replica_that_is_busy_may_be_asked_for_again(house):
    replica = await house.replica(holding())
    busy = await house.replica(lambda asked: asked.answer(429, b"busy"))
    await house.balance(replica, busy, policy=PolicySettings(name="round_robin"))
    replies = []
    for _ in range(4):  # either one is asked first
        replies.append(await ask_for(house, "show"))
        await house.ask("/v1/responses", b'{"input": "new"}')
    looked_on = [one for one in replies if one.body != b"busy"]
    assert looked_on
    for one in replies:
        assert one.status == (503 if one in looked_on else 429)
    for one in looked_on:
        assert one.fields["retry-after"] == "1"
        assert f"replica {busy.url} answered 429" in one.json["error"]["message"]


async def test_one_of_a_replica_that_is_full_may_be_asked_for_again(house):
    async def hold(asked):
        if asked.body:
            await asked.until_gone()
        else:
            await asked.answer(404, NOT_FOUND)

    full, replica = await house.replica(hold), await house.replica(holding())
    few = ReplicaSettings(url=full.url, max_outstanding=1)
    await house.balance(few, replica)
    callers = [await house.caller() for _ in range(2)]
    for caller in callers:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: b\r\nContent-Length: 2\r\n\r\n{}"
        await caller.send(head)
    await house.until(lambda: full.asked)
    reply = await ask_for(house, "show")
    assert reply.status == 503
    assert f"replica {full.url} cannot be asked, and may hold it" in reply.json["error"]["message"]
    for caller in callers:
        caller.hang_up()


async def test_a_model_that_is_not_there_is_no_stored_response(house):
    replicas = [await house.replica(lambda asked: asked.answer(404, b"no model")) for _ in range(3)]
    await house.balance(*replicas)
    for path, body in (("/v1/responses", b'{"input": "x"}'), ("/v1/completions", b"{}")):
        assert (await house.ask(path, body)).body == b"no model"
    assert sum(len(one.asked) for one in replicas) == 2


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        (b"/v1/responses/resp_1", b"", "resp_1"),
        (b"/v1/responses/resp_1/", b"", "resp_1"),
        (b"/v1/responses/resp_1/cancel", b"", "resp_1"),
        (b"/v1/responses/render", b"{}", ""),
        (b"/v1/responses/render", b'{"previous_response_id": "r"}', "r"),
        (b"/v1/responses", b'{"input": "x", "previous_response_id": "r"}', "r"),
        (b"/v1/responses", b'\xef\xbb\xbf{"previous\\u005fresponse_id": "r"}', "r"),
        (b"/v1/responses", b'{"previous_response_id": null}', ""),
        (b"/v1/responses", b"{", ""),
        (b"/v1/responses/", b'{"previous_response_id": "r"}', "r"),
        (b"/v1/models/resp_1", b"", ""),
        (b"/v1/chat/completions", b'{"previous_response_id": "r"}', ""),
    ],
)
def test_which_requests_need_one(path, body, named):
    message = ClientRequest()
    message.path, message.body = path, [body] if body else []
    assert stored_response(message) == named
