"""An OTLP receiver over gRPC that keeps the spans it receives: a small collector."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass(frozen=True, slots=True)
class ReceivedSpan:
    """A span as received.

    Attributes:
        parent_id: Id of the parent span; empty for none.
        kind: Kind of the span as OTLP's number: 1 internal, 2 server, 3 client.
        is_error: True if the span's status is that of an error.
        resource: Attributes of the process that made the span.
    """

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    kind: int
    start_s: float
    end_s: float
    attributes: dict[str, Any]
    is_error: bool
    resource: dict[str, Any]

    @property
    def took_s(self) -> float:
        return self.end_s - self.start_s


class OtlpReceiver:
    """Receiver that listens on a free port of this machine from its construction until ``stop``."""

    def __init__(self) -> None:
        self._by_trace: dict[str, list[ReceivedSpan]] = defaultdict(list)
        self._changed = threading.Condition()
        self._server = grpc.server(ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(_Service(self), self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        self.url = f"http://127.0.0.1:{port}"
        self._server.start()

    def stop(self) -> None:
        self._server.stop(None).wait()

    def take(self, spans: list[ReceivedSpan]) -> None:
        with self._changed:
            for span in spans:
                self._by_trace[span.trace_id].append(span)
            self._changed.notify_all()

    def trace(self, trace_id: str, timeout_s: float = 60.0) -> list[ReceivedSpan]:
        """Return the spans of a trace once its server span has arrived, which is sent last.

        Raises:
            TimeoutError: The server span has not arrived in time.
        """
        until_s = time.monotonic() + timeout_s
        with self._changed:
            while not any(one.kind == 2 for one in self._by_trace.get(trace_id, ())):
                if not self._changed.wait(until_s - time.monotonic()):
                    raise TimeoutError(f"no server span of trace {trace_id} in {timeout_s:g} s")
            return list(self._by_trace[trace_id])


class _Service(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self, receiver: OtlpReceiver) -> None:
        self._receiver = receiver

    def Export(self, request: Any, context: Any) -> Any:
        for of_process in request.resource_spans:
            resource = _plain(of_process.resource.attributes)
            for scope in of_process.scope_spans:
                self._receiver.take([_span(one, resource) for one in scope.spans])
        return trace_service_pb2.ExportTraceServiceResponse()


def _span(one: Any, resource: dict[str, Any]) -> ReceivedSpan:
    return ReceivedSpan(
        one.trace_id.hex(),
        one.span_id.hex(),
        one.parent_span_id.hex(),
        one.name,
        one.kind,
        one.start_time_unix_nano / 1e9,
        one.end_time_unix_nano / 1e9,
        _plain(one.attributes),
        one.status.code == 2,
        resource,
    )


def _plain(attributes: Any) -> dict[str, Any]:
    return {one.key: _value(one.value) for one in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind)
