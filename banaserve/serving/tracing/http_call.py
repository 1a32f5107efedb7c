"""Call of the server that the current task serves, by HTTP or not: its times and its tracing."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any


@dataclass
class HttpCall:
    """A call of the server, by HTTP or not; times are on the machine's monotonic clock.

    Attributes:
        began_s: Time at which the head had been received.
        began_at_s: The same time in seconds since 1970.
        received_s: Time at which the last byte of the body was received; ``began_s`` before that.
        answered_s: Time at which the last byte of the answer was written, or the client left.
        status: HTTP status of the answer; 0 before that.
        headers: Headers of the trace context.
        traced: State that the tracer keeps of the call: its own span, and each request's notes.
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
        """Time at which the body had been received, in seconds since 1970."""
        return self.began_at_s + self.received_s - self.began_s


http_call: ContextVar[HttpCall | None] = ContextVar("http_call", default=None)
"""HTTP request that the current task serves; None for a call without HTTP."""
