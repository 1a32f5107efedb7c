"""The HTTP request that the current task serves: its times, and what traces it."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol


class RequestSpan(Protocol):
    """OpenTelemetry's span of one request, as the rest of the front door sees it.

    Attributes:
        trace_id: 32 hexadecimal digits.
        exemplar: Labels that lead from a histogram to the trace; None where it is not recorded.
    """

    trace_id: str
    exemplar: dict[str, str] | None


class RequestTracer(Protocol):
    """Makes spans of requests."""

    def begin(self, call: HttpCall, notes: Any, params: Any) -> RequestSpan:
        """Returns the span of a request of ``call``.

        Args:
            notes: ``RequestNotes`` of it, which will say more once the answer has left.
            params: vLLM's ``SamplingParams`` of it.
        """

    def answered(self, call: HttpCall) -> None:
        """The answer has left; called once for each call."""


@dataclass
class HttpCall:
    """An HTTP request; times are on the machine's monotonic clock.

    Attributes:
        began_s: When its head had come.
        began_at_s: The same, in seconds since 1970.
        received_s: When the last byte of its body had come; ``began_s`` before that.
        answered_s: When the last byte of its answer had been written, or the client had left.
        status: Of the answer; 0 before that.
        headers: Those of its trace context.
        traced: What the tracer keeps of it: its own span, and each request's notes.
    """

    began_s: float
    began_at_s: float
    method: str = ""
    path: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    received_s: float = 0.0
    answered_s: float | None = None
    status: int = 0
    traced: Any = None

    def __post_init__(self) -> None:
        self.received_s = self.received_s or self.began_s

    @property
    def arrived_at_s(self) -> float:
        """When the body had come, in seconds since 1970."""
        return self.began_at_s + self.received_s - self.began_s


http_call: ContextVar[HttpCall | None] = ContextVar("http_call", default=None)
"""Of the current task; None outside of one."""
