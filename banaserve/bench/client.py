"""A streaming client of OpenAI-compatible servers that writes down when each token came.

A failure of any kind is a record with ``error``; nothing is dropped and nothing is retried.
"""

from __future__ import annotations

import codecs
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec

from banaserve.bench.record import RequestRecord
from banaserve.clock import Clock, WallClock

Message = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Call:
    """A request to make.

    Attributes:
        prompt: Text or token ids for the completions endpoint.
        messages: Instead of ``prompt``: for the chat endpoint.
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

    @property
    def path(self) -> str:
        return "/v1/completions" if self.prompt is not None else "/v1/chat/completions"

    def body(self, model: str, return_token_ids: bool) -> dict[str, Any]:
        """Returns the JSON body: streamed, with usage at the end."""
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
    """One server, as many connections as there are requests under way.

    Args:
        return_token_ids: Ask for token ids (vLLM has them, others may refuse the field).
        timeout_s: For a whole request, its queueing in the server included.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key: str | None = None,
        return_token_ids: bool = False,
        timeout_s: float = 600.0,
        clock: Clock | None = None,
    ) -> None:
        self.clock = clock or WallClock()
        self._base_url = base_url.rstrip("/").removesuffix("/v1")
        self._model = model
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._return_token_ids = return_token_ids
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=self._timeout, headers=self._headers
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def send(self, call: Call, due_at_s: float | None = None) -> RequestRecord:
        """Makes ``call``, waits for its end and returns its record, whatever came of it."""
        record = RequestRecord(id=call.id, due_at_s=due_at_s, sent_at_s=self.clock.now())
        return await self.send_into(call, record)

    async def send_into(self, call: Call, record: RequestRecord) -> RequestRecord:
        """As ``send``; ``record`` can be read while the stream goes on, and after a cancel."""
        try:
            await self._stream(call, record)
        except TimeoutError:
            record.error = f"timed out after {self._timeout.total:g} s"
        except (aiohttp.ClientError, OSError) as error:
            record.error = f"{type(error).__name__}: {error}"
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            record.error = f"the server sent a broken event: {error}"
        record.ended_at_s = self.clock.now()
        return record

    async def _stream(self, call: Call, record: RequestRecord) -> None:
        assert self._session is not None, "use the client in an async with block"
        body = msgspec.json.encode(call.body(self._model, self._return_token_ids))
        async with self._session.post(
            self._base_url + call.path, data=body, headers={"Content-Type": "application/json"}
        ) as response:
            record.status = response.status
            if response.status != 200:
                record.error = f"HTTP {response.status}: {_line(await response.text())}"
                return
            async for event in _events(response.content):
                if event == "[DONE]":
                    return
                _note(record, msgspec.json.decode(event, type=_Event), self.clock.now())
                if record.error is not None:
                    return
            record.error = "the stream ended before it was done"


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: dict[str, Any] | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None

    def content(self) -> str:
        """The text of the event: of a completion, or a chat's answer and its reasoning."""
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


def _note(record: RequestRecord, event: _Event, at_s: float) -> None:
    """Writes one event into the record."""
    if event.error is not None:
        record.error = _line(_message(event.error))
        return
    if event.usage is not None:
        details = event.usage.prompt_tokens_details
        record.prompt_tokens = event.usage.prompt_tokens
        record.completion_tokens = event.usage.completion_tokens
        record.cached_tokens = details.cached_tokens if details else None
    for choice in event.choices:
        content = choice.content()
        token_ids = choice.token_ids or []
        num_tokens = len(token_ids) if choice.token_ids is not None else bool(content)
        if num_tokens and record.first_token_at_s is None:
            record.first_token_at_s = at_s
        record.token_at_s.extend([at_s] * num_tokens)
        record.token_ids.extend(token_ids)
        record.text += content
        record.finish_reason = choice.finish_reason or record.finish_reason


def _message(error: Any) -> str:
    message = error.get("message") if isinstance(error, dict) else None
    return str(message or error)


def _line(text: str, max_chars: int = 500) -> str:
    return " ".join(text.split())[:max_chars]


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[str]:
    """Yields the data of server-sent events.

    Reads pieces, not lines: aiohttp limits a line's length, and the first event of a long prompt
    with token ids passes that limit.
    """
    decode = codecs.getincrementaldecoder("utf-8")().decode
    rest = ""
    async for piece in content.iter_any():
        *lines, rest = (rest + decode(piece)).split("\n")
        for line in lines:
            if line.startswith("data:"):
                yield line.removeprefix("data:").strip()
    if rest.startswith("data:"):
        yield rest.removeprefix("data:").strip()
