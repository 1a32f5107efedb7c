"""OpenTelemetry spans: sent to a collector over OTLP, or dropped; no request waits for one."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import pytest

pytest.importorskip("vllm")

from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from prometheus_client import REGISTRY
from vllm.sampling_params import SamplingParams

import imported_without_traces
from banaserve.base.clock import WallClock
from banaserve.base.types import ClusterView, InstanceId, InstanceView, Role, Route
from banaserve.contracts.trace_events import FirstToken, LegBegan, Prepared
from banaserve.engine.compat.front.server import get_span_exporter
from banaserve.frontdoor.middleware.request_context import CallTimes
from banaserve.serving.tracing import otlp
from banaserve.serving.tracing.otlp import BoundedSpans, OtlpTracer
from banaserve.serving.tracing.request_log import (
    HttpCall,
    RequestLog,
    RequestSpan,
    SeenRoute,
    http_call,
)
from banaserve.serving.tracing.trace_collection import TraceCollector
from forked import Forked
from otlp_receiver import OtlpReceiver
from waiting import until

pytestmark = pytest.mark.deep

TRACE, PARENT = "0123456789abcdef0123456789abcdef", "0123456789abcdef"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
SECRET = "what the client asked"


def count(outcome: str) -> float:
    return REGISTRY.get_sample_value("banaserve_trace_spans_total", {"outcome": outcome}) or 0.0


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    one = OtlpReceiver()
    yield one
    one.stop()


class World:
    """The front door's part of a server without engines, which serves at ``ask``."""

    def __init__(self, exporter: SpanExporter, **options: Any) -> None:
        self.log = RequestLog(WallClock())
        collector = TraceCollector({}, WallClock())
        self.tracer = OtlpTracer(exporter, collector, "tiny", **options)
        self.tracer.start()

    async def ask(
        self,
        headers: dict[str, str] | None = None,
        *,
        path: str = "/v1/chat/completions",
        num_requests: int = 1,
        error: RuntimeError | None = None,
    ) -> HttpCall:
        seen: list[HttpCall] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await receive()
            call = http_call.get()
            assert call is not None
            seen.append(call)
            for number in range(num_requests):
                await self._serve(call, f"chatcmpl-{number}", error)
            await send({"type": "http.response.start", "status": 500 if error else 200})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        fields = [(k.encode(), v.encode("latin-1")) for k, v in (headers or {}).items()]
        scope = {"type": "http", "method": "POST", "path": path, "headers": fields}

        async def receive() -> Any:
            return {"type": "http.request", "body": SECRET.encode(), "more_body": False}

        async def send(_: Any) -> None: ...

        await CallTimes(app, self.tracer)(scope, receive, send)
        return seen[0]

    async def _serve(self, call: HttpCall, name: str, error: RuntimeError | None) -> None:
        params = SamplingParams(max_tokens=7, temperature=0.5)
        with (
            contextlib.suppress(RuntimeError),
            self.log.following(name, 5, call) as notes,
        ):
            notes.span = self.tracer.begin(call, notes, params)
            notes.note(Prepared())
            seen = InstanceView(InstanceId("d0"), Role.DECODE, True, None, 1, 7, 1.0)
            route = Route(None, InstanceId("d0"), "short_prompt")
            notes.note(SeenRoute("load_aware", route, None, ClusterView(0.0, {seen.id: seen})), "r")
            notes.note(LegBegan("whole", "d0", "r"), "r", 1)
            if error is not None:
                raise error
            notes.note(FirstToken("decode"))
            notes.tokens_so_far, notes.finish_reason = (lambda: 3), "stop"


@pytest.fixture
async def world(receiver: OtlpReceiver) -> AsyncIterator[World]:
    one = World(get_span_exporter(receiver.url))
    yield one
    await one.tracer.close()


# ---- what a collector gets


async def test_a_request_is_a_child_of_what_the_client_traces(
    receiver: OtlpReceiver, world: World
) -> None:
    await world.ask(HEADERS)
    spans = await asyncio.to_thread(receiver.trace, TRACE)
    by_name = {one.name: one for one in spans}
    server = by_name["POST /v1/chat/completions"]
    request = by_name["chat tiny"]
    assert (server.parent_id, server.kind) == (PARENT, 2)
    assert server.attributes["http.response.status_code"] == 200
    assert request.parent_id == server.span_id
    assert by_name["prefill"].parent_id == by_name["route"].parent_id == request.span_id
    assert by_name["respond"].parent_id == server.span_id
    assert request.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "banaserve",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.id": "chatcmpl-0",
        "gen_ai.request.max_tokens": 7,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.usage.input_tokens": 5,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.response.time_to_first_chunk": request.attributes[
            "gen_ai.response.time_to_first_chunk"
        ],
        "gen_ai.response.finish_reasons": ["stop"],
        "banaserve.missing": ["d0 has been removed, and its notes with it"],
    }
    assert by_name["route"].attributes["banaserve.reason"] == "short_prompt"
    assert server.resource["service.name"] == "banaserve"
    assert SECRET not in repr(spans)
    for one in spans:
        assert server.start_s - 1e-6 <= one.start_s <= one.end_s <= server.end_s + 1e-6


async def test_a_trace_is_found_by_its_id(world: World) -> None:
    await world.ask(HEADERS)
    found = world.log.find(TRACE)
    assert found is not None
    assert found.summary().trace_id == TRACE
    assert world.log.find("f" * 32) is None


async def test_several_prompts_of_one_body_are_one_trace(
    receiver: OtlpReceiver, world: World
) -> None:
    await world.ask(HEADERS, path="/v1/completions", num_requests=3)
    spans = await asyncio.to_thread(receiver.trace, TRACE)
    names = [one.name for one in spans]
    assert names.count("text_completion tiny") == 3
    assert (names.count("respond"), names.count("POST /v1/completions")) == (1, 1)


async def test_an_error_is_told_without_its_words(receiver: OtlpReceiver, world: World) -> None:
    await world.ask(HEADERS, error=RuntimeError(SECRET))
    spans = await asyncio.to_thread(receiver.trace, TRACE)
    by_name = {one.name: one for one in spans}
    assert by_name["chat tiny"].is_error
    assert by_name["POST /v1/chat/completions"].is_error
    assert SECRET not in repr(spans)


async def test_what_a_client_does_not_want_recorded_is_not(world: World) -> None:
    before = sum(map(count, ("sent", "failed", "dropped")))
    call = await world.ask({"traceparent": f"00-{TRACE}-{PARENT}-00"})
    [(_, notes)] = call.traced.requests
    assert notes.span == RequestSpan(TRACE, None)
    await world.tracer.close()
    assert sum(map(count, ("sent", "failed", "dropped"))) == before


async def test_a_call_without_a_request_is_no_trace(world: World) -> None:
    call = await world.ask(HEADERS, num_requests=0)
    assert call.traced is None
    assert not world.tracer._waiting


# ---- hostile trace contexts

HEX = "0123456789abcdef"
MALFORMED = [
    "",
    "00",
    f"00-{'0' * 32}-{PARENT}-01",
    f"00-{TRACE}-{'0' * 16}-01",
    f"ff-{TRACE}-{PARENT}-01",
    f"00-{TRACE.upper()}-{PARENT}-01",
    f"00-{TRACE}-{PARENT}-01-more",
    f"00-{TRACE}{'a' * 5000}-{PARENT}-01",
    f"00-{TRACE}-{PARENT}-zz",
]


class Kept(SpanExporter):
    """Keeps spans; ``hangs`` until it is let go, or refuses them."""

    def __init__(self, result: SpanExportResult = SpanExportResult.SUCCESS) -> None:
        self.spans: list[ReadableSpan] = []
        self.lets_go = threading.Event()
        self.lets_go.set()
        self._result = result

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.lets_go.wait()
        self.spans += spans
        return self._result

    def shutdown(self) -> None:
        self.lets_go.set()


@pytest.mark.parametrize("traceparent", MALFORMED)
async def test_a_malformed_traceparent_is_none(traceparent: str) -> None:
    world = World(Kept())
    call = await world.ask({"traceparent": traceparent, "tracestate": "a=b"})
    assert call.traced.server.parent is None
    await world.tracer.close()


@given(
    traceparent=st.text(st.characters(max_codepoint=255), max_size=80)
    | st.from_regex(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}.{0,4}", fullmatch=True),
    tracestate=st.text(st.characters(max_codepoint=255), max_size=600)
    | st.lists(st.text("ab=,@/ \t", max_size=9), max_size=40).map(",".join),
)
@settings(max_examples=300, deadline=None)
def test_no_trace_context_is_an_error(traceparent: str, tracestate: str) -> None:
    headers = {"traceparent": traceparent, "tracestate": tracestate}
    call = HttpCall(0.0, 0.0, "POST", "/v1/completions", headers)
    span = QUIET._server_span(call)
    assert span.get_span_context().trace_id


QUIET = OtlpTracer(Kept(), TraceCollector({}, WallClock()), "tiny")


# ---- a collector that is dead or hangs


async def test_spans_beyond_the_queue_are_dropped_and_counted_while_a_collector_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(otlp, "_CLOSE_S", 0.01)
    exporter = Kept()
    exporter.lets_go.clear()
    world = World(exporter, max_spans=16)
    sent, dropped = count("sent"), count("dropped")
    for _ in range(20):
        await world.ask(HEADERS)
    num_made = 20 * len(("receive", "prepare", "route", "prefill", "respond", "request", "server"))
    await until(lambda: count("dropped") == dropped + num_made - 16)
    assert count("sent") == sent
    await world.tracer.close()  # it does not wait for the collector, which goes on only then
    exporter.lets_go.set()
    await until(lambda: count("sent") == sent + 16)


async def test_spans_that_a_collector_refuses_are_counted() -> None:
    world = World(Kept(SpanExportResult.FAILURE))
    failed = count("failed")
    await world.ask(HEADERS)
    await world.tracer.close()
    assert count("failed") > failed


async def test_calls_wait_within_bounds_for_engines_that_do_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(otlp, "MAX_WAITING_CALLS", 4)
    world = World(Kept())

    class Silent:
        async def traces_of(self, _: object) -> Any:
            await asyncio.Event().wait()

    world.tracer._collector = Silent()  # type: ignore[assignment]
    monkeypatch.setattr(otlp, "_CLOSE_S", 0.01)
    dropped = count("dropped")
    for _ in range(6):
        await world.ask(HEADERS)
    assert count("dropped") == dropped + 2 * 2
    await world.tracer.close()


def test_the_queue_gives_room_back() -> None:
    exporter = Kept()
    bounded = BoundedSpans(exporter, max_spans=2)
    spans = [ReadableSpan(str(number)) for number in range(3)]
    for one in spans:
        one._context = QUIET._server_span(HttpCall(0.0, 0.0)).get_span_context()
    exporter.lets_go.clear()
    dropped = count("dropped")
    for one in spans:
        bounded.on_end(one)
    assert count("dropped") == dropped + 1
    exporter.lets_go.set()
    bounded.force_flush()
    bounded.on_end(spans[2])
    bounded.force_flush()
    assert [one.name for one in exporter.spans] == ["0", "1", "2"]
    bounded.shutdown()


# ---- off


async def test_without_a_tracer_nothing_is_kept_of_a_trace_context() -> None:
    seen: list[HttpCall | None] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        seen.append(http_call.get())

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(_: Any) -> None: ...

    fields = [(k.encode(), v.encode()) for k, v in HEADERS.items()]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": fields}
    await CallTimes(app)(scope, receive, send)
    [call] = seen
    assert call is not None
    assert (call.headers, call.traced) == ({}, None)
    assert call.began_s <= call.received_s <= (call.answered_s or 0.0)
    assert http_call.get() is None


@pytest.mark.room
def test_a_server_without_the_option_loads_none_of_it() -> None:
    assert Forked(imported_without_traces.check).wait() == 0
