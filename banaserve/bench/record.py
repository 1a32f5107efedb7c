"""What a benchmark client writes down of each request."""

from __future__ import annotations

import msgspec


class RequestRecord(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One request; times are seconds on the client's clock.

    Attributes:
        due_at_s: When the arrival process wanted it sent; null in a closed loop.
        sent_at_s: When it was sent. Latency from ``due_at_s`` leaves out no client delay.
        first_token_at_s: When the first token came; null where none did.
        ended_at_s: When the stream ended or the failure was known.
        token_at_s: When each token came; tokens of one event share a time. A server that returns
            no token ids has one entry an event with text.
        token_ids: Empty unless asked for and returned.
        prompt_tokens: With the next two: the server's own count, null where it gave none.
        status: HTTP status; null where no answer came.
        error: What went wrong in one line; null for a request that succeeded.
    """

    id: str
    sent_at_s: float
    due_at_s: float | None = None
    first_token_at_s: float | None = None
    ended_at_s: float | None = None
    token_at_s: list[float] = []
    token_ids: list[int] = []
    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    status: int | None = None
    error: str | None = None

    @property
    def ttft_s(self) -> float | None:
        """Seconds from sending to the first token."""
        if self.first_token_at_s is None:
            return None
        return self.first_token_at_s - self.sent_at_s

    @property
    def latency_s(self) -> float | None:
        """Seconds from sending to the end; None where the request failed."""
        if self.ended_at_s is None or self.error is not None:
            return None
        return self.ended_at_s - self.sent_at_s

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between one token and the next."""
        return [b - a for a, b in zip(self.token_at_s, self.token_at_s[1:], strict=False)]
