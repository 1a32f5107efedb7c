"""Records of requests: spans for OpenTelemetry, lines for the decision log. No prompt text.

The SDK is optional (extra ``tracing``); without it the W3C trace context is passed on unchanged.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from banaserve.base.errors import UserError
from banaserve_route.balancer.config import BalancerSettings
from banaserve_route.balancer.requests.proxy import ProxiedRequest
from banaserve_route.policies.interface import Flight


class Observer(Protocol):
    """Recorder of each request, at its beginning and its end."""

    def began(self, proxied: ProxiedRequest) -> None: ...

    def ended(self, proxied: ProxiedRequest, now_s: float) -> None: ...

    def close(self) -> None: ...


def observers(settings: BalancerSettings, log: Callable[[str], None]) -> list[Observer]:
    """Return the observers that ``settings`` asks for.

    Raises:
        UserError: A file cannot be written, or a library is not installed.
    """
    made: list[Observer] = []
    if settings.decision_log:
        made.append(RoutingLog(Path(settings.decision_log), settings.region, log))
    if settings.traces:
        made.append(Spans(settings.traces, settings.region))
    return made


def describe(flight: Flight) -> dict[str, Any]:
    """Return one attempt in plain values: its prediction and its outcome."""
    decision = flight.decision
    first_s, ended_s = flight.first_token_s, flight.ended_s
    found: dict[str, Any] = {
        "target": str(flight.target),
        "reason": str(decision.reason),
        "waited_ms": _ms(flight.sent_s - flight.request.arrived_s),
        "hit_tokens": decision.hit_tokens,
        "round_trip_ms": _ms(flight.round_trip_ms / 1e3),
        "backlog_tokens": flight.backlog_tokens,
    }
    predicted_ms = decision.scores_ms.get(flight.target)
    if predicted_ms is not None:
        found["predicted_ms"] = round(predicted_ms, 3)
    if first_s is not None:
        found["first_byte_ms"] = _ms(first_s - flight.sent_s)
    if ended_s is not None:
        found["ended_ms"] = _ms(ended_s - flight.sent_s)
    if flight.cached_tokens is not None:
        found["cached_tokens"] = flight.cached_tokens
    return found


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


class RoutingLog:
    """Log of one JSON line per request; after a line that cannot be written, no more are."""

    def __init__(self, path: Path, region: str, log: Callable[[str], None]) -> None:
        """Raise UserError if ``path`` cannot be written."""
        try:
            # Unbuffered: a reader that follows the file sees each request as soon as it has ended.
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}") from error
        self._path, self._region, self._log = path, region, log
        self._has_failed = False
        self._encode = msgspec.json.Encoder().encode

    def began(self, proxied: ProxiedRequest) -> None: ...

    def ended(self, proxied: ProxiedRequest, now_s: float) -> None:
        request = proxied.request
        line = {
            "at": time.time(),
            "region": self._region,
            "trace": proxied.parent.decode("latin-1"),
            "was_forwarded": request.was_forwarded,
            "model": request.model,
            "prompt_tokens": request.num_tokens,
            "status": proxied.status,
            "took_ms": _ms(now_s - request.arrived_s),
            "attempts": [describe(flight) for flight in proxied.flights],
        }
        try:
            if not self._has_failed:
                self._file.write(self._encode(line) + b"\n")
        except OSError as error:
            self._fail(error)

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        if not self._has_failed:
            self._has_failed = True
            self._log(f"cannot write {self._path}: {error.strerror}; no more decisions are logged")


class Spans:
    """Spans sent to an OTLP collector: one per request, and one below it for each attempt.

    The next hop gets the request's span as its parent, so that a request's path over several
    balancers is one trace.
    """

    def __init__(self, url: str, region: str, processor: Any = None) -> None:
        """``processor``: a span processor instead of the one that sends to ``url``.

        Raises:
            UserError: OpenTelemetry's SDK is not installed.
        """
        try:
            from opentelemetry.propagate import extract, inject
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider

            processor = processor or _exporting(url)
        except ImportError as error:
            raise UserError(
                "traces need OpenTelemetry: pip install opentelemetry-sdk "
                "opentelemetry-exporter-otlp-proto-http, or leave the setting out"
            ) from error
        resource = Resource({"service.name": "banaserve-route", "banaserve.region": region})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("banaserve_route.balancer")
        self._extract, self._inject = extract, inject
        self._open: dict[ProxiedRequest, Any] = {}

    def began(self, proxied: ProxiedRequest) -> None:
        from opentelemetry.trace import SpanKind, set_span_in_context

        seen = proxied.message.seen
        carrier = {
            name: seen[name.encode()].decode("latin-1")
            for name in ("traceparent", "tracestate")
            if name.encode() in seen
        }
        span = self._tracer.start_span(
            "route", context=self._extract(carrier), kind=SpanKind.SERVER
        )
        onward: dict[str, str] = {}
        self._inject(onward, context=set_span_in_context(span))
        proxied.parent = onward.get("traceparent", "").encode()
        self._open[proxied] = span

    def ended(self, proxied: ProxiedRequest, now_s: float) -> None:
        from opentelemetry.trace import SpanKind, set_span_in_context

        span = self._open.pop(proxied, None)
        if span is None:
            return
        now_ns = time.time_ns()

        def at_ns(at_s: float) -> int:
            return now_ns - int((now_s - at_s) * 1e9)

        context = set_span_in_context(span)
        for flight in proxied.flights:
            attempt = self._tracer.start_span(
                "attempt", context, SpanKind.CLIENT, start_time=at_ns(flight.sent_s)
            )
            for key, value in describe(flight).items():
                attempt.set_attribute(f"banaserve.{key}", value)
            attempt.end(at_ns(flight.ended_s or now_s))
        span.set_attribute("http.response.status_code", proxied.status)
        span.set_attribute("banaserve.was_forwarded", proxied.request.was_forwarded)
        span.set_attribute("banaserve.prompt_tokens", proxied.request.num_tokens)
        span.end(now_ns)

    def close(self) -> None:
        self._provider.shutdown()


def _exporting(url: str) -> Any:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    return BatchSpanProcessor(OTLPSpanExporter(f"{url.rstrip('/')}/v1/traces"))
