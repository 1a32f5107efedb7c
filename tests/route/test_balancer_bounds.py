"""What hostile input and full disks may cost: never memory without bound, never the clock."""

from __future__ import annotations

import asyncio
import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from msgspec import structs

from banaserve.base.types import RequestId
from banaserve_route.balancer import server
from banaserve_route.balancer.balancer import Balancer
from banaserve_route.balancer.config import (
    BalancerSettings,
    LimitSettings,
    PolicySettings,
    ReplicaSettings,
)
from banaserve_route.balancer.head_checks import HeadChecks
from banaserve_route.balancer.http.client_connection import UNREAD_S, ClientConnection
from banaserve_route.balancer.http.request import ClientRequest, RequestRefusedError
from banaserve_route.balancer.requests.routing_request import MAX_CONVERTED_BYTES, read_request
from banaserve_route.balancer.targets.peers import PeerState, ReplicaState
from banaserve_route.balancer.tracing import RoutingLog
from counters import counted

POST = b"POST /v1/completions HTTP/1.1\r\nHost: b\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
GET = b"GET /v1/models HTTP/1.1\r\nHost: b\r\n\r\n"


def message_of(body):
    message = ClientRequest()
    message.add_body(body, 1 << 30)
    return message


@pytest.mark.parametrize("before", [b"0\r\nX: ", b"1;", b"1\r\na\r\n0\r\nX: a\r\nY: "])
async def test_what_stands_beside_a_body_is_bounded(house, before):
    replica = await house.replica()
    await house.balance(replica)
    caller = await house.caller()
    await caller.send(CHUNKED + before + b"a" * 400_000)
    assert (await caller.reply()).status == 431
    assert replica.asked == []


async def test_a_body_in_many_chunks_is_no_long_head(house):
    replica = await house.replica()
    await house.balance(replica)
    caller = await house.caller()
    await caller.send(CHUNKED + b"1\r\na\r\n" * 50_000 + b"0\r\n\r\n")
    assert (await caller.reply()).status == 200
    assert replica.asked[0].body == b"a" * 50_000


async def test_a_head_behind_a_request_under_way_is_bounded(house):
    go_on = asyncio.Event()

    async def hold(asked):
        await go_on.wait()
        await asked.answer()

    replica = await house.replica(hold)
    balancer = await house.balance(replica)
    caller = await house.caller()
    await caller.send(GET)
    await house.until(lambda: replica.asked)
    await caller.send(b"GET /v1/models HTTP/1.1\r\nX: " + b"a" * 400_000)
    await house.until(lambda: counted(balancer, "refused", status="431"))
    go_on.set()
    assert (await caller.reply()).status == 200
    assert (await caller.reply()).status == 431


async def test_a_body_that_nests_too_deeply_for_us_is_the_replica_s_to_judge(house):
    replica = await house.replica()
    await house.balance(replica, limits=LimitSettings(max_attempts=1), decision_log="/dev/null")
    reply = await house.ask(body=b'{"messages":' + b"[" * 50_000 + b"]" * 50_000 + b"}")
    assert reply.status == 200
    assert len(replica.asked) == 1


async def test_interim_answers_are_many_without_depth(house):
    end = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
    interim = b"HTTP/1.1 100 \r\n\r\n" * 5_000
    balancer = await house.balance(await house.replica(lambda one: one.send(interim + end)))
    assert (await house.ask()).status == 200
    assert sum(one.num_broken for one in balancer.targets.values()) == 0


async def test_a_shorter_time_limit_holds_behind_requests_with_a_longer_one(house):
    async def hold(asked):
        await asked.until_gone()

    replica = await house.replica(hold)
    balancer = await house.balance(replica)
    first = asyncio.create_task(house.ask())
    await house.until(lambda: replica.asked)
    limits = structs.replace(balancer.settings.limits, request_timeout_s=0.05)
    balancer.change(structs.replace(balancer.settings, limits=limits))
    assert (await house.ask()).status == 504
    first.cancel()


async def test_a_client_narrows_regions_under_a_policy_that_reads_nothing(house):
    replica = await house.replica()
    await house.balance(replica, region="us")
    refused = await house.ask(fields="X-Banaserve-Regions: eu\r\n")
    assert refused.status == 503
    assert replica.asked == []
    assert (await house.ask(fields="X-Banaserve-Regions: eu, us\r\n")).status == 200


def test_small_parts_of_a_body_are_joined():
    message = ClientRequest()
    for _ in range(50_000):
        message.add_body(b"ab", 1 << 30)
    assert b"".join(message.body) == b"ab" * 50_000
    assert len(message.body) < 5_000
    assert message.size == 100_000


def test_large_parts_of_a_body_are_left_alone():
    message = ClientRequest()
    for _ in range(1000):
        message.add_body(b"a" * 100, 1 << 30)
    assert len(message.body) == 1000


def test_names_that_are_kept_are_short():
    body = msgspec.json.encode({"model": "m" * 10_000, "user": "u" * 10_000})
    request = read_request(RequestId("1"), message_of(body), 0.0, None, False)
    assert request.model == "m" * 256
    assert request.session == "u" * 256


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
@pytest.mark.parametrize("padding", [0, MAX_CONVERTED_BYTES])
def test_a_long_body_in_another_encoding_is_not_read_for_routing(padding, encoding):
    body = json.dumps({"model": "m", "prompt": "x" * padding}).encode(encoding)
    request = read_request(RequestId("1"), message_of(body), 0.0, None, False)
    assert request.model == ("" if padding and encoding == "utf-16" else "m")


@pytest.mark.parametrize(
    ("number", "tokens"), [(b"16", 16), (b"16.0", 16), (b"1e1", 10), (b"-1", 0), (b'"16"', 0)]
)
@pytest.mark.parametrize("name", [b"max_tokens", b"max_completion_tokens"])
def test_a_number_in_any_form_of_vllm_hides_no_model(name, number, tokens):
    body = b'{"model": "m", "%b": %b}' % (name, number)
    request = read_request(RequestId("1"), message_of(body), 0.0, None, False)
    assert (request.model, request.expected_output_tokens) == ("m", tokens)


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("more", ["", "Content-Type: text/plain\r\n"])
def test_a_form_with_a_long_file_names_its_model(is_first, more):
    model = f'--b\r\nContent-Disposition: form-data; name="model"\r\n{more}\r\nm\r\n'
    file = '--b\r\nContent-Disposition: form-data; name="file"; filename="model"\r\n\r\n'
    file += "x" * 10**6 + "\r\n"
    body = "".join([model, file] if is_first else [file, model]).encode() + b"--b--\r\n"
    assert read_request(RequestId("1"), message_of(body), 0.0, None, False).model == "m"


def test_a_model_that_is_null_hides_no_prompt():
    body = b'{"model": null, "prompt": "hello there"}'
    request = read_request(RequestId("1"), message_of(body), 0.0, None, False)
    assert (request.model, request.prompt) == ("", b'"hello there"')


async def test_any_number_of_output_tokens_can_be_asked_for(house):
    replica = await house.replica()
    await house.balance(replica, policy=PolicySettings(name="gorgo"))
    reply = await house.ask(body=b'{"prompt": "a", "max_tokens": %b}' % (b"9" * 400))
    assert reply.status == 200


def test_a_long_context_is_no_nonsense_to_peers():
    state = PeerState(
        region="a",
        pending=3 * 10**6,
        replicas=[ReplicaState("http://a:1", "a", [], max_prompt_tokens=1_048_576)],
    )
    assert msgspec.json.decode(msgspec.json.encode(state), type=PeerState) == state


def test_a_full_disk_ends_the_decision_log_and_nothing_else():
    said = []
    log = RoutingLog(Path("/dev/full"), "r", said.append)
    request = read_request(RequestId("1"), message_of(b'{"model":"m"}'), 0.0, None, False)
    exchange = SimpleNamespace(request=request, parent=b"", status=200, flights=[])
    for _ in range(2_000):
        log.ended(exchange, 1.0)
    log.close()
    assert len(said) == 1
    assert "/dev/full" in said[0]


async def test_the_clock_goes_on_after_a_step_that_failed(monkeypatch):
    monkeypatch.setattr(server, "TICK_S", 0.0)
    said, went_on = [], asyncio.Event()

    def fail():
        raise KeyError("odd")

    ticking = asyncio.create_task(
        server.tick(SimpleNamespace(tick=fail, tick_slowly=went_on.set, log=said.append))
    )
    await asyncio.wait_for(went_on.wait(), 60)
    ticking.cancel()
    assert "KeyError" in said[0]


class Pipe:
    """A transport whose other end has not read ``unread`` bytes."""

    def __init__(self):
        self.unread = 0
        self.ends = []

    def get_extra_info(self, name):
        return ("127.0.0.1", 9) if name == "peername" else self

    def setsockopt(self, *_):
        self.ends.append("reset")

    def fileno(self):
        return -1

    def get_write_buffer_size(self):
        return self.unread

    def can_write_eof(self):
        return True

    def is_closing(self):
        return False

    def write_eof(self):
        self.ends.append("eof")

    def abort(self):
        self.ends.append("abort")

    def close(self):
        self.ends.append("close")


def connected(pipe):
    handler = SimpleNamespace(
        opened=lambda _: True, hold=lambda _: None, dropped=lambda _cause, _why: None
    )
    client = ClientConnection(handler)
    client.connection_made(pipe)
    return client


@pytest.mark.parametrize("can_go_on", [True, False])
def test_the_end_of_an_answer_is_not_cut_off_while_it_is_read(can_go_on):
    pipe = Pipe()
    client = connected(pipe)
    client.can_go_on = can_go_on
    client.done(ClientRequest())
    now_s = client._closes_at_s + 1
    for pipe.unread in (300_000, 200_000, 100_000):
        now_s += UNREAD_S - 1
        client.sweep(now_s)
        assert "abort" not in pipe.ends
        assert "close" not in pipe.ends
    client.sweep(now_s + UNREAD_S + 1)  # the sum of two times is rounded
    assert pipe.ends[-2:] == ["reset", "abort"]


def test_nothing_begins_on_a_connection_that_ends():
    client = connected(Pipe())
    client._waiting.append(ClientRequest())
    client.can_go_on = False
    client.done(ClientRequest())
    assert not client._waiting


@pytest.mark.parametrize(
    ("target", "passed_on"),
    [
        (b"http://any.example/v1/models?a=b", b"/v1/models?a=b"),
        (b"HTTPS://any.example:443/v1/chat/completions", b"/v1/chat/completions"),
        (b"http://[fd00::1]:80/ready", b"/ready"),
        (b"http://any.example", b"/"),
        (b"/http://any.example/", None),
        (b"http:///v1/models", None),
        (b"ftp://any.example/v1/models", None),
        (b"http://any.example/../admin", None),
        (b"http://any.example\\v1/models", None),
        (b"*", None),
    ],
)
def test_a_target_in_absolute_form_is_its_path(target: bytes, passed_on: bytes | None) -> None:
    message = ClientRequest()
    message.add_url(target)
    message.add_field(b"Host", b"any.example")
    if passed_on is None:
        with pytest.raises(RequestRefusedError):
            message.head_complete(b"GET", "1.1", True)
        return
    message.head_complete(b"GET", "1.1", True)
    assert (message.target, message.path) == (passed_on, passed_on.partition(b"?")[0])
    assert b"".join(message.parts(b"")).startswith(b"GET " + passed_on + b" HTTP/1.1\r\n")


@pytest.mark.parametrize("path", [b"/health", b"/metrics", b"/ui/"])
@pytest.mark.parametrize("framing", [b"Content-Length: 1", b"Transfer-Encoding: chunked"])
def test_no_path_of_the_balancer_takes_a_body_without_a_key(path: bytes, framing: bytes) -> None:
    checks = HeadChecks(BalancerSettings(api_keys=("good",), admin_key="of-the-admin"))
    for fields in ([], [framing], [framing, b"Authorization: Bearer good"]):
        message = ClientRequest()
        message.add_url(path)
        for line in (b"Host: b", *fields):
            message.add_field(*line.split(b": "))
        message.head_complete(b"POST", "1.1", True)
        with pytest.raises(RequestRefusedError) if fields == [framing] else nullcontext():
            assert checks.is_own(message)


def test_a_large_body_behind_an_offer_of_http_2_is_no_long_head() -> None:
    refused: list[RequestRefusedError] = []
    client = connected(Pipe())
    client._handler.check_head = lambda *_: None
    client._handler.refused = refused.append
    client._handler.max_body_bytes, client._handler.body_timeout_s = 2**20, 30.0
    client._handler.take = lambda _, message: sizes.append(message.size)
    sizes: list[int] = []
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nContent-Length: 400000\r\n\r\n"
    client.data_received(POST + offer + bytes(200_000))
    client.data_received(bytes(200_000))
    assert (refused, sizes) == ([], [400_000])


async def test_a_request_counts_those_that_have_begun_since_its_head() -> None:
    replica = ReplicaSettings(url="http://127.0.0.1:1")
    limits = LimitSettings(max_requests=1)
    balancer = Balancer(BalancerSettings(replicas=(replica,), limits=limits), print)
    answers: list[bytes] = []
    client = SimpleNamespace(
        peer=("client", 1), can_go_on=True, write=answers.append, done=lambda _: None
    )
    [target] = balancer.targets.values()
    target.is_healthy = target.view.is_available = False  # so that requests wait
    for message in (messages := [message_of(b"{}"), message_of(b"{}")]):
        message.path = b"/v1/completions"
        balancer.check_head(client, message)
    assert [balancer.take(client, one) is None for one in messages] == [False, True]
    assert [one.partition(b"\r\n")[0] for one in answers] == [b"HTTP/1.1 429 Too Many Requests"]
    balancer.close()
