"""The streaming client against a server of canned answers, and the loops against a stub."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from aiohttp import web
from aiohttp.test_utils import TestServer

from banaserve_bench.loadgen.client import CompletionCall, OpenAiClient, RequestRecord, _Answer
from banaserve_bench.loadgen.loops import closed_loop, open_loop

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
CALL = CompletionCall("r0", "Once upon", max_tokens=3)


class Ticks:
    """A clock that goes on by one second at each look."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def now(self) -> float:
        self.now_s += 1.0
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("nobody sleeps here")


def data(event: object) -> bytes:
    return b"data: " + (event if isinstance(event, bytes) else json.dumps(event).encode()) + b"\n\n"


def streaming(*pieces: bytes, seen: list[dict[str, Any]] | None = None) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        if seen is not None:
            seen.append({"path": request.path, "headers": request.headers, **await request.json()})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
        return response

    return handle


@asynccontextmanager
async def served(handler: Handler, **options: Any) -> AsyncIterator[OpenAiClient]:
    app = web.Application()
    app.router.add_post("/{path:.*}", handler)
    async with TestServer(app) as server:
        options.setdefault("clock", Ticks())
        async with OpenAiClient(str(server.make_url("")), "m", **options) as client:
            yield client


async def answer(handler: Handler, call: CompletionCall = CALL, **options: Any) -> RequestRecord:
    async with served(handler, **options) as client:
        return await client.send(call)


async def test_completion_with_token_ids() -> None:
    seen: list[dict[str, Any]] = []
    usage = {
        "prompt_tokens": 2,
        "completion_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    record = await answer(
        streaming(
            data({"choices": [{"text": "", "token_ids": [], "prompt_token_ids": [1, 2]}]}),
            data({"choices": [{"text": " a", "token_ids": [7]}]}),
            data({"choices": [{"text": " time", "token_ids": [8, 9], "finish_reason": "length"}]}),
            data({"choices": [], "usage": usage}),
            data(b"[DONE]"),
            seen=seen,
        ),
        CompletionCall("r0", "Once upon", max_tokens=3, extra={"ignore_eos": True}),
        return_token_ids=True,
        api_key="secret",
    )
    assert record.error is None
    assert (record.text, record.token_ids, record.finish_reason) == (" a time", [7, 8, 9], "length")
    assert (record.prompt_tokens, record.completion_tokens, record.cached_tokens) == (2, 3, 1)
    assert (record.sent_at_s, record.first_token_at_s, record.token_at_s) == (1, 3, [3, 4, 4])
    assert (record.ended_at_s, record.ttft_s, record.latency_s, record.gaps_s) == (7, 2, 6, [1, 0])
    [body] = seen
    assert body["path"] == "/v1/completions"
    assert body["headers"]["Authorization"] == "Bearer secret"
    assert (body["prompt"], body["max_tokens"], body["ignore_eos"]) == ("Once upon", 3, True)
    assert body["stream_options"] == {"include_usage": True}
    assert body["return_token_ids"] is True


async def test_chat_without_token_ids() -> None:
    seen: list[dict[str, Any]] = []
    record = await answer(
        streaming(
            data({"choices": [{"delta": {"role": "assistant", "content": ""}}]}),
            data({"choices": [{"delta": {"content": "Hel"}}]}),
            b": a comment\n\n",
            data({"choices": [{"delta": {"content": "lo"}, "finish_reason": "stop"}]}),
            b"data: [DONE]",
            seen=seen,
        ),
        CompletionCall("r0", messages=({"role": "user", "content": "Hi"},)),
    )
    assert (record.error, record.text, record.finish_reason) == (None, "Hello", "stop")
    assert (len(record.token_at_s), record.token_ids) == (2, [])
    assert seen[0]["path"] == "/v1/chat/completions"
    assert "return_token_ids" not in seen[0]


@pytest.mark.parametrize(
    "delta",
    [
        {"reasoning_content": "Hm"},
        {"reasoning": "Hm"},
        {"tool_calls": [{"index": 0, "function": {"name": "look", "arguments": ""}}]},
    ],
)
async def test_the_first_token_of_a_chat_may_be_of_reasoning_or_a_tool_call(
    delta: dict[str, Any],
) -> None:
    deltas = [{"role": "assistant", "content": ""}, delta, {"content": None, "tool_calls": []}]
    record = await answer(
        streaming(*(data({"choices": [{"delta": one}]}) for one in deltas), b"data: [DONE]"),
        CompletionCall("r0", messages=({"role": "user", "content": "Hi"},)),
    )
    assert record.error is None
    assert record.first_token_at_s is not None
    assert record.token_at_s == [record.first_token_at_s]


async def test_read_late_every_token_keeps_the_time_of_its_piece() -> None:
    pieces = [data({"choices": [{"text": str(n), "token_ids": [n]}]}) for n in range(200)]
    record = RequestRecord(id="r0", sent_at_s=0.0)
    seen = _Answer(record, Ticks().now, 64)
    seen.on_status(200)
    for number, piece in enumerate(pieces, start=1):
        seen.on_piece(piece)
        assert len(record.token_at_s) == number // 64 * 64
    seen.on_piece(data(b"[DONE]"))
    seen.catch_up()
    seen.end()
    assert record.error is None
    assert record.token_ids == list(range(200))
    assert record.token_at_s == [float(tick) for tick in range(1, 201)]


async def test_events_split_anywhere_and_longer_than_a_line_limit() -> None:
    event = data({"choices": [{"text": "é" * 200_000, "token_ids": [1]}]}) + data(b"[DONE]")
    event = event.replace(b"\\u00e9", "é".encode())
    record = await answer(streaming(event[:99_999], event[99_999:100_000], event[100_000:]))
    assert (record.error, record.text) == (None, "é" * 200_000)


@pytest.mark.parametrize(
    ("pieces", "error"),
    [
        ([data({"choices": [{"text": "a"}]})], "ended before it was done"),
        ([], "ended before it was done"),
        ([data({"error": {"message": "engine\ndied", "code": 500}})], "engine died"),
        ([data({"error": "plain words"})], "plain words"),
        ([data(b"{broken")], "broken event"),
        ([b"data: \xff\xff\n\n"], "broken event"),
    ],
)
@pytest.mark.parametrize("read_late", [False, True])
async def test_broken_streams(pieces: list[bytes], error: str, read_late: bool) -> None:
    record = await answer(streaming(*pieces), read_late=read_late)
    assert error in (record.error or "")
    assert record.status == 200
    assert record.ended_at_s is not None
    assert record.latency_s is None


async def test_http_error() -> None:
    async def busy(request: web.Request) -> web.Response:
        return web.Response(status=429, text='{"error":\n "too many"}')

    record = await answer(busy)
    assert record.status == 429
    assert record.error == 'HTTP 429: {"error": "too many"}'


async def test_a_connection_that_breaks() -> None:
    async def breaks(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        response.enable_chunked_encoding()
        await response.prepare(request)
        await response.write(data({"choices": [{"text": "a"}]}))
        assert request.transport is not None
        request.transport.abort()
        return response

    record = await answer(breaks)
    assert record.error
    assert record.latency_s is None


async def test_nobody_listens() -> None:
    async with served(streaming()) as client:
        address = client._base_url
    async with OpenAiClient(address, "m", clock=Ticks()) as client:
        record = await client.send(CALL)
    assert "ConnectionRefusedError" in (record.error or "")
    assert record.status is None


async def test_timeout() -> None:
    ended = asyncio.Event()

    async def hangs(request: web.Request) -> web.Response:
        await ended.wait()
        return web.Response()

    async with served(hangs, timeout_s=0.05) as client:
        record = await client.send(CALL)
        ended.set()
    assert record.error == "timed out after 0.05 s"


async def test_an_answer_that_ends_with_its_connection() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.partition(b"Content-Length: ")[2].split(b"\r\n")[0]))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
        writer.write(data({"choices": [{"text": "x"}]}) + b"data: [DONE]\n\n")
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with OpenAiClient(f"http://127.0.0.1:{port}", "m") as client:
            record = await client.send(CALL)
    assert (record.error, record.text) == (None, "x")


async def test_a_connection_that_the_system_gives_up_did_not_take_our_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def post(*_: object) -> None:
        raise TimeoutError(110, "Connection timed out")

    async with OpenAiClient("http://127.0.0.1:1", "m") as client:
        monkeypatch.setattr(client._streams, "post", post)
        record = await client.send(CALL)
    assert record.error == "TimeoutError: [Errno 110] Connection timed out"


def test_a_call_is_either_completion_or_chat() -> None:
    with pytest.raises(ValueError, match="either"):
        CompletionCall("r0")
    with pytest.raises(ValueError, match="either"):
        CompletionCall("r0", "text", messages=({"role": "user", "content": "Hi"},))


class VirtualTime:
    """Time that passes only in sleep."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def now(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)
        self.now_s += seconds


class Stub:
    """Holds requests until there are ``wanted`` of them; counts how many it held at most."""

    def __init__(self, wanted: int) -> None:
        self.clock = VirtualTime()
        self.wanted = wanted
        self.held = 0
        self.most_held = 0
        self.release = asyncio.Event()
        self.three_held = asyncio.Event()

    async def send_into(self, call: CompletionCall, record: RequestRecord) -> RequestRecord:
        self.held += 1
        self.most_held = max(self.most_held, self.held)
        if self.held == 3:
            self.three_held.set()
        if self.held == self.wanted:
            self.release.set()
        await self.release.wait()
        self.held -= 1
        return record


def calls(count: int) -> list[CompletionCall]:
    return [CompletionCall(f"r{n}", "x") for n in range(count)]


async def test_open_loop_waits_for_nobody() -> None:
    stub: Any = Stub(wanted=3)
    done: list[str] = []
    records = await open_loop(stub, calls(3), [0.0, 0.5, 2.0], lambda r: done.append(r.id))
    assert [r.id for r in records] == ["r0", "r1", "r2"]
    assert [r.due_at_s for r in records] == [100.0, 100.5, 102.0]
    assert [r.sent_at_s for r in records] == [100.0, 100.5, 102.0]
    assert sorted(done) == ["r0", "r1", "r2"]


async def test_closed_loop_keeps_its_concurrency() -> None:
    stub: Any = Stub(wanted=3)
    records = await closed_loop(stub, calls(7), 3)
    assert [r.id for r in records] == [f"r{n}" for n in range(7)]
    assert stub.most_held == 3


async def test_a_stopped_loop_still_tells_of_what_was_under_way() -> None:
    stub: Any = Stub(wanted=9)
    told: list[RequestRecord] = []
    run = asyncio.create_task(open_loop(stub, calls(3), [0.0, 0.0, 0.0], told.append))
    await stub.three_held.wait()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert {(r.id, r.error) for r in told} == {(f"r{n}", "interrupted") for n in range(3)}


async def test_loops_of_nonsense() -> None:
    stub: Any = SimpleNamespace(clock=VirtualTime())
    with pytest.raises(ValueError, match="arrival times"):
        await open_loop(stub, calls(2), [0.0])
    with pytest.raises(ValueError, match="1 or more"):
        await closed_loop(stub, calls(2), 0)
    assert await closed_loop(stub, [], 4) == []
    assert await open_loop(stub, [], []) == []
