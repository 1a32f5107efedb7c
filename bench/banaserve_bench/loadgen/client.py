"""Streaming client of OpenAI-compatible servers that records the time of each token.

A failure of any kind is a record with ``error``; nothing is dropped and nothing is retried.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import msgspec

from banaserve.base.clock import Clock, WallClock
from banaserve.base.errors import UserError
from banaserve_bench.loadgen.http import HttpExchange, HttpStreams


class RequestRecord(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Record of one request; times are seconds on the client's clock.

    Attributes:
        due_at_s: Time at which the arrival process wanted the request sent; null in a closed loop.
        sent_at_s: Time of sending. Latency from ``due_at_s`` includes every delay of the client.
        first_token_at_s: Arrival of the first token; null if none came.
        ended_at_s: End of the stream, or the time when the failure was known.
        token_at_s: Arrival of each token; tokens of one event share a time. If the server returns
            no token ids, an entry for each event with text or a part of a tool call.
        token_ids: Token ids of the answer; empty unless requested and returned.
        prompt_tokens: Prompt tokens by the server's count; null if it gave none, as are
            ``completion_tokens`` and ``cached_tokens``.
        status: HTTP status; null if no answer came.
        error: Description of the failure in one line; null for a request that succeeded.
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

    def checked(self) -> Self:
        """Return this record.

        Raises:
            UserError: The request failed.
        """
        if self.error:
            raise UserError(f"a request failed: {self.error}")
        return self

    @property
    def arrival_s(self) -> float:
        """Time at which the request was due; that of sending in a closed loop."""
        return self.sent_at_s if self.due_at_s is None else self.due_at_s

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


Message = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class CompletionCall:
    """A request to make.

    Attributes:
        prompt: Text or token ids for the completions endpoint.
        messages: Messages for the chat endpoint, instead of ``prompt``.
        extra: Further fields of the request body (seed, ignore_eos, ...).
    """

    id: str
    prompt: str | list[int] | None = None
    messages: tuple[Message, ...] = ()
    max_tokens: int = 16
    temperature: float = 0.0
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.prompt is None) == (not self.messages):
            raise ValueError("give either a prompt or messages")

    @classmethod
    def exact(cls, id: str, prompt: str | list[int], num_tokens: int, **extra: Any) -> Self:
        """Return a greedy call whose answer has ``num_tokens`` tokens on vLLM."""
        more = {"ignore_eos": True, **extra}
        return cls(id, prompt=prompt, max_tokens=num_tokens, extra=more)

    @classmethod
    def numbered(cls, prompts: Iterable[str | list[int]], num_tokens: int) -> list[Self]:
        """Return an exact call for each prompt, whose id is its number."""
        return [cls.exact(str(n), prompt, num_tokens) for n, prompt in enumerate(prompts)]

    @property
    def path(self) -> str:
        return "/v1/completions" if self.prompt is not None else "/v1/chat/completions"

    def body(self, model: str, return_token_ids: bool) -> dict[str, Any]:
        """Return the JSON body: streamed, with usage at the end."""
        asked = {"prompt": self.prompt} if self.prompt is not None else {"messages": self.messages}
        return {
            "model": model,
            **asked,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"return_token_ids": True} if return_token_ids else {}),
            **self.extra,
        }


class OpenAiClient:
    """Client of one server, with a connection for each request in progress.

    Args:
        return_token_ids: True to ask for token ids (vLLM has them, others may refuse the field).
        timeout_s: Time limit of a whole request, including its queueing in the server, in seconds.
        read_late: True to note the arrival of pieces and parse some dozens at a time, for half the
            CPU; a record then shows less while its stream goes on.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key: str | None = None,
        return_token_ids: bool = False,
        timeout_s: float = 600.0,
        read_late: bool = False,
        clock: Clock | None = None,
    ) -> None:
        self.clock = clock or WallClock()
        self._base_url = base_url.rstrip("/").removesuffix("/v1")
        self._model = model
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._return_token_ids = return_token_ids
        self._timeout_s = timeout_s
        self._read_late = read_late
        self._streams = HttpStreams(self._base_url)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._streams.close()

    async def send(self, call: CompletionCall, due_at_s: float | None = None) -> RequestRecord:
        """Make ``call``, wait for its end and return its record, failed or not."""
        record = RequestRecord(id=call.id, due_at_s=due_at_s, sent_at_s=self.clock.now())
        return await self.send_into(call, record)

    async def send_into(self, call: CompletionCall, record: RequestRecord) -> RequestRecord:
        """Like ``send``; ``record`` can be read while the stream goes on, and after a cancel."""
        body = msgspec.json.encode(call.body(self._model, self._return_token_ids))
        answer = _Answer(record, self.clock.now, _LATE_PIECES if self._read_late else 1)
        try:
            try:
                async with asyncio.timeout(self._timeout_s):
                    await self._streams.post(call.path, self._headers, body, answer)
            finally:
                answer.catch_up()
            answer.end()
        except OSError as error:
            # A timeout of the operating system, such as that of a connection, has an errno.
            if isinstance(error, TimeoutError) and error.errno is None:
                record.error = f"timed out after {self._timeout_s:g} s"
            elif not answer.is_done:  # an answer may end with its connection
                record.error = f"{type(error).__name__}: {error}"
        record.ended_at_s = self.clock.now()
        return record


_LATE_PIECES = 64
"""Number of pieces parsed at a time: parsing delays the next arrivals by 0.3 ms at most."""


class _Answer(HttpExchange):
    """Parser that writes a stream of events into a record, ``num_pieces`` pieces at a time.

    Attributes:
        is_done: True if the final event, or one with an error, has been read.
    """

    def __init__(self, record: RequestRecord, now: Callable[[], float], num_pieces: int) -> None:
        self._record = record
        self._now = now
        self._num_pieces = num_pieces
        self._waiting: list[tuple[float, bytes]] = []
        self._rest = b""
        self.is_done = False

    def on_status(self, status: int) -> None:
        self._record.status = status

    def on_piece(self, piece: bytes) -> None:
        self._waiting.append((self._now(), piece))
        if len(self._waiting) >= self._num_pieces:
            self.catch_up()

    def catch_up(self) -> None:
        """Parse the pieces that have arrived; an invalid event becomes the record's error."""
        waiting, self._waiting = self._waiting, []
        for at_s, piece in waiting:
            if self._record.status != 200:
                self._rest += piece
                continue
            *lines, self._rest = (self._rest + piece).split(b"\n")
            for line in lines:
                self._read(line, at_s)

    def end(self) -> None:
        """Complete the record after the end of the body."""
        record = self._record
        if record.status != 200:
            text = self._rest.decode(errors="replace")
            record.error = f"HTTP {record.status}: {_line(text)}"
            return
        if self._rest:
            self._read(self._rest, self._now())
        if not self.is_done and record.error is None:
            record.error = "the stream ended before it was done"

    def _read(self, line: bytes, at_s: float) -> None:
        if self.is_done or not line.startswith(b"data:"):
            return
        event = line[5:].strip()
        if event == b"[DONE]":
            self.is_done = True
            return
        try:
            _note(self._record, _decode(event), at_s)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self._record.error = f"the server sent a broken event: {error}"
        self.is_done = self._record.error is not None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: dict[str, Any] | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None

    def content(self) -> str:
        """Return the text of the event: of a completion, or of a chat answer and its reasoning."""
        if self.delta is None:
            return self.text or ""
        parts = (self.delta.get(key) for key in ("reasoning_content", "reasoning", "content"))
        return "".join(part for part in parts if isinstance(part, str))


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


def _note(record: RequestRecord, event: _Event, at_s: float) -> None:
    """Write one event into the record."""
    if event.error is not None:
        error = event.error
        message = error.get("message") if isinstance(error, dict) else None
        record.error = _line(str(message or error))
        return
    if event.usage is not None:
        details = event.usage.prompt_tokens_details
        record.prompt_tokens = event.usage.prompt_tokens
        record.completion_tokens = event.usage.completion_tokens
        record.cached_tokens = details.cached_tokens if details else None
    for choice in event.choices:
        content = choice.content()
        token_ids = choice.token_ids or []
        has_output = bool(content or (choice.delta or {}).get("tool_calls"))
        num_tokens = len(token_ids) if choice.token_ids is not None else has_output
        if num_tokens and record.first_token_at_s is None:
            record.first_token_at_s = at_s
        record.token_at_s.extend([at_s] * num_tokens)
        record.token_ids.extend(token_ids)
        record.text += content
        record.finish_reason = choice.finish_reason or record.finish_reason


def _line(text: str, max_chars: int = 500) -> str:
    return " ".join(text.split())[:max_chars]
