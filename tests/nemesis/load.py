"""Streams without a pause while faults come, written down as a history."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import Iterator, Mapping

import httpx

from history import Asked, History
from streams import Kind
from waiting import thinks

TIMEOUT_S = 300.0


class Load:
    """A few clients, each of which asks again as soon as it has its answer.

    Args:
        url: Of the server.
        kinds: What they ask, in turn.
    """

    def __init__(self, url: str, kinds: Mapping[str, Kind], history: History) -> None:
        self._url = url
        self._kinds = itertools.cycle(kinds.items())
        self._history = history
        self._numbers = itertools.count()
        self._is_over = False

    def end(self) -> None:
        """Ask nothing more; what is under way ends."""
        self._is_over = True

    def run(self, num_clients: int) -> None:
        """Ask until told to end; blocks until the last answer has ended."""
        asyncio.run(self._run(num_clients))

    async def _run(self, num_clients: int) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=self._url, timeout=TIMEOUT_S, limits=limits) as http:
            await asyncio.gather(*(self._client(http) for _ in range(num_clients)))

    async def _client(self, http: httpx.AsyncClient) -> None:
        while not self._is_over:
            name, kind = next(self._kinds)
            number = next(self._numbers)
            asked = Asked(f"r{number}", name, time.monotonic(), is_first=number % 4 == 0)
            salt = f"salt {number}" if asked.is_first else "salt of all others"
            kind = Kind(kind.path, {**kind.body, "cache_salt": salt})
            self._history.requests.append(asked)
            with contextlib.suppress(TimeoutError):  # the history shows that it has not ended
                async with asyncio.timeout(TIMEOUT_S):
                    await ask(http, kind, asked)
            if asked.errors or asked.broken:
                await thinks(0.5)


async def ask(http: httpx.AsyncClient, kind: Kind, asked: Asked) -> None:
    """Stream one answer into its record."""
    try:
        async with http.stream("POST", kind.path, json=kind.body) as response:
            if response.status_code != 200:
                body = (await response.aread()).decode()
                asked.errors.append(f"HTTP {response.status_code}: {body[:300]}")
            else:
                async for line in response.aiter_lines():
                    _note(asked, line)
    except httpx.HTTPError as error:
        asked.broken = f"{type(error).__name__}: {error}"
    asked.ended_s = time.monotonic()


def _note(asked: Asked, line: str) -> None:
    if not line.startswith("data: "):
        return
    data = line.removeprefix("data: ")
    if data == "[DONE]":
        asked.num_done += 1
        return
    chunk = json.loads(data)
    details = (chunk.get("usage") or {}).get("prompt_tokens_details") or {}
    asked.cached_tokens = details.get("cached_tokens") or asked.cached_tokens
    if "error" in chunk:
        asked.errors.append(data[:300])
    for tokens, is_last in _choices(chunk):
        if tokens and (asked.num_finished or asked.errors or asked.num_done):
            asked.num_late_tokens += len(tokens)
        asked.tokens += tokens
        asked.num_finished += is_last


def _choices(chunk: dict[str, object]) -> Iterator[tuple[list[int], bool]]:
    choices = chunk.get("choices")
    for choice in choices if isinstance(choices, list) else []:
        yield choice.get("token_ids") or [], bool(choice.get("finish_reason"))
