"""OpenTelemetry spans of requests, sent to an OTLP collector; imported only if enabled.

Names and attributes are those of OpenTelemetry's semantic conventions for HTTP servers and for
generative AI; names that the conventions lack begin with ``banaserve.``. No span holds text of a
prompt or of an answer.

No request waits for tracing: spans are made after the answer has been sent, by a task that asks the
engines for their notes, and go through a queue of bounded length to a thread that sends them. Spans
that find a queue full are dropped and counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from banaserve import __version__
from banaserve.base.platform.processes import in_daemon_thread
from banaserve.base.tasks import end_tasks
from banaserve.contracts.trace_events import RequestTrace, TraceSpan
from banaserve.serving.monitoring.metrics import TRACE_SPANS
from banaserve.serving.tracing.request_log import HttpCall, RequestNotes, RequestSpan
from banaserve.serving.tracing.spans import SpanName
from banaserve.serving.tracing.trace_collection import TraceCollector

logger = logging.getLogger(__name__)
MAX_WAITING_CALLS = 1024
"""Maximum number of calls about which the engines have not been asked yet."""
MAX_QUEUED_SPANS = 8192
"""Maximum number of spans that wait for the collector or are being sent: a few megabytes."""
_BATCH_CALLS = 64
_COLLECT_EVERY_S = 0.5
_CLOSE_S = 3.0
_PREFIX = "banaserve."
_OPERATIONS = {"/v1/completions": "text_completion", "/inference/v1/generate": "text_completion"}
_OF_CALL = (SpanName.RECEIVE, SpanName.RESPOND)
_SERVER_ERROR = 500


class _CountingExporter(SpanExporter):
    """Exporter that counts the outcomes of the spans that another exporter sends.

    Attributes:
        num_ended: Number of spans that were sent or have failed for good.
    """

    def __init__(self, inner: SpanExporter) -> None:
        self._inner = inner
        self.num_ended = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = SpanExportResult.FAILURE
        try:
            result = self._inner.export(spans)
        finally:
            self.num_ended += len(spans)
            is_sent = result is SpanExportResult.SUCCESS
            TRACE_SPANS.labels("sent" if is_sent else "failed").inc(len(spans))
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()


class BoundedSpans(BatchSpanProcessor):
    """OpenTelemetry's batch processor, which refuses spans if its queue is full.

    OpenTelemetry's own queue drops the oldest span and counts nothing.

    Args:
        max_spans: Maximum number of spans that wait or are being sent.
    """

    def __init__(self, exporter: SpanExporter, max_spans: int = MAX_QUEUED_SPANS) -> None:
        self._exporter = _CountingExporter(exporter)
        super().__init__(
            self._exporter,
            max_queue_size=max_spans,
            max_export_batch_size=min(512, max_spans),
            schedule_delay_millis=1000,
        )
        self._max_spans = max_spans
        self._num_taken = 0

    def on_end(self, span: ReadableSpan) -> None:
        if self._num_taken - self._exporter.num_ended >= self._max_spans:
            TRACE_SPANS.labels("dropped").inc()
            return
        self._num_taken += 1
        super().on_end(span)


@dataclass
class _Traced:
    """State kept of a call: its own span, and its requests."""

    server: Span
    requests: list[tuple[Span, RequestNotes]] = field(default_factory=list)


class OtlpTracer:
    """Maker of spans of requests.

    Used on the event loop; call ``start`` there first.

    Args:
        exporter: Exporter that sends spans; it may block, since it runs in a separate thread.
        model: Name of the model for clients.
        max_spans: Maximum number of spans that wait or are being sent.
    """

    def __init__(
        self,
        exporter: SpanExporter,
        collector: TraceCollector,
        model: str,
        max_spans: int = MAX_QUEUED_SPANS,
    ) -> None:
        resource = Resource.create({"service.name": "banaserve", "service.version": __version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BoundedSpans(exporter, max_spans))
        self._tracer = self._provider.get_tracer("banaserve", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._collector = collector
        self._model = model
        self._waiting: deque[HttpCall] = deque()
        self._collecting: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the task that collects traces."""

        async def collect() -> None:
            while True:
                await asyncio.sleep(_COLLECT_EVERY_S)
                while self._waiting:
                    await self._collect()

        self._collecting = asyncio.create_task(collect())

    async def close(self) -> None:
        """Collect, then send the remaining spans, for at most three seconds each: both may hang."""
        await end_tasks(self._collecting)
        with contextlib.suppress(TimeoutError, CancelledError):
            async with asyncio.timeout(_CLOSE_S):
                while self._waiting:
                    await self._collect()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                await in_daemon_thread(self._provider.shutdown)

    # ---- while a request runs

    def begin(self, call: HttpCall, notes: RequestNotes, params: Any) -> RequestSpan:
        """Begin the span of a request of ``call``, and return the span's identity.

        Args:
            notes: Notes of the request, complete only once the answer has been sent.
        """
        traced = call.traced
        if traced is None:
            traced = call.traced = _Traced(self._server_span(call))
        operation = _OPERATIONS.get(call.path, "chat")
        span = self._tracer.start_span(
            f"{operation} {self._model}",
            set_span_in_context(traced.server),
            SpanKind.INTERNAL,
            _request_attributes(operation, self._model, notes.request_id, params),
            start_time=_ns(call.arrived_at_s),
        )
        traced.requests.append((span, notes))
        context = span.get_span_context()
        trace_id = f"{context.trace_id:032x}"
        exemplar = {"trace_id": trace_id, "span_id": f"{context.span_id:016x}"}
        return RequestSpan(trace_id, exemplar if span.is_recording() else None)

    def answered(self, call: HttpCall) -> None:
        """Note that the answer has been sent; called once for each call."""
        if call.traced is None:
            return
        if len(self._waiting) >= MAX_WAITING_CALLS:
            self._drop(call)
        else:
            self._waiting.append(call)

    def _server_span(self, call: HttpCall) -> Span:
        # A malformed trace context counts as none; the propagator raises nothing for it.
        parent = self._propagator.extract(dict(call.headers))
        return self._tracer.start_span(
            f"{call.method} {call.path}",
            parent,
            SpanKind.SERVER,
            {"http.request.method": call.method, "url.path": call.path, "http.route": call.path},
            start_time=_ns(call.began_at_s),
        )

    def _drop(self, call: HttpCall) -> None:
        if call.traced.server.is_recording():
            TRACE_SPANS.labels("dropped").inc(1 + len(call.traced.requests))

    # ---- afterwards

    async def _collect(self) -> None:
        calls = [self._waiting.popleft() for _ in range(min(_BATCH_CALLS, len(self._waiting)))]
        recorded = [call for call in calls if call.traced.server.is_recording()]
        requests = [notes for call in recorded for _, notes in call.traced.requests]
        try:
            traces = iter(await self._collector.traces_of(requests))
        except Exception:
            logger.exception("%d traced calls are lost", len(recorded))
            for call in recorded:
                self._drop(call)
            return
        for call in recorded:
            self._export(call, [next(traces) for _ in call.traced.requests])

    def _export(self, call: HttpCall, traces: Sequence[RequestTrace]) -> None:
        server = call.traced.server
        last = max(traces, key=lambda one: one.summary.took_s, default=None)
        arrived_ns = _ns(call.arrived_at_s)

        def at_ns(at_s: float) -> int:
            return arrived_ns + _ns(at_s)

        for (own, _), trace in zip(call.traced.requests, traces, strict=True):
            made: list[Span] = []
            for part in trace.spans:
                if part.name in _OF_CALL:
                    parent = server
                else:
                    parent = made[part.parent] if part.parent >= 0 else own
                if part.name not in _OF_CALL or trace is last:
                    made.append(self._part(part, parent, at_ns))
                else:
                    made.append(server)  # several requests of a call share these parts: made once
            _end_request(own, trace, at_ns)
        server.set_attribute("http.response.status_code", call.status)
        if call.status >= _SERVER_ERROR:
            server.set_status(Status(StatusCode.ERROR))
            server.set_attribute("error.type", str(call.status))
        answered_s = call.answered_s if call.answered_s is not None else call.received_s
        server.end(_ns(call.began_at_s + answered_s - call.began_s))

    def _part(self, part: TraceSpan, parent: Span, at_ns: Callable[[float], int]) -> Span:
        attributes = {f"{_PREFIX}{key}": value for key, value in part.attributes.items()}
        span = self._tracer.start_span(
            part.name,
            set_span_in_context(parent),
            SpanKind.INTERNAL,
            {f"{_PREFIX}process": part.process, **attributes},
            start_time=at_ns(part.start_s),
        )
        if part.error:
            span.set_status(Status(StatusCode.ERROR, part.error))
            span.set_attribute("error.type", "instance_lost")
        span.end(at_ns(part.end_s))
        return span


def _ns(at_s: float) -> int:
    return int(at_s * 1e9)


def _request_attributes(
    operation: str, model: str, request_id: str, params: Any
) -> Mapping[str, str | int | float]:
    given = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "banaserve",
        "gen_ai.request.model": model,
        "gen_ai.response.id": request_id,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.choice.count": params.n if params.n != 1 else None,
    }
    return {name: value for name, value in given.items() if value is not None}


def _end_request(span: Span, trace: RequestTrace, at_ns: Callable[[float], int]) -> None:
    summary = trace.summary
    span.set_attribute("gen_ai.usage.input_tokens", summary.prompt_tokens)
    span.set_attribute("gen_ai.usage.output_tokens", summary.output_tokens)
    span.set_attribute("gen_ai.usage.cache_read.input_tokens", summary.cached_tokens)
    if summary.ttft_s is not None:
        span.set_attribute("gen_ai.response.time_to_first_chunk", summary.ttft_s)
    if summary.end == "error":
        span.set_status(Status(StatusCode.ERROR))
        span.set_attribute("error.type", "error")
    elif summary.end == "closed":
        span.set_attribute(f"{_PREFIX}end", "closed by the client")
    elif summary.end:
        span.set_attribute("gen_ai.response.finish_reasons", [summary.end])
    if trace.missing:
        span.set_attribute(f"{_PREFIX}missing", trace.missing)
    span.end(at_ns(summary.took_s))
