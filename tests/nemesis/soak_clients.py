"""Clients of all sorts for hours: patient ones, ones that hang up, ones without the right key."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Awaitable, Callable

import httpx

from history import Asked
from load import ask
from streams import Kind
from waiting import thinks

KEYS = ("the-first-one", "the-second-one", "the-third-one")
"""Of three tenants."""
_MODEL = "smollm2-135m"


class SoakClients:
    """They ask until told to end.

    Attributes:
        told: How requests ended, counted.
        wrong: Ends that no client should have seen.
    """

    def __init__(self, url: str, seed: int) -> None:
        self.told = Counter[str]()
        self.wrong: list[str] = []
        self._url = url
        self._draw = random.Random(seed)
        self._is_over = False

    def end(self) -> None:
        """Ask nothing more; what is under way ends."""
        self._is_over = True

    def run(self, num_clients: int) -> None:
        """Ask; blocks until told to end."""
        asyncio.run(self._run(num_clients))

    async def _run(self, num_clients: int) -> None:
        await asyncio.gather(*(self._client() for _ in range(num_clients)))

    async def _client(self) -> None:
        kinds: list[tuple[Callable[[httpx.AsyncClient], Awaitable[str]], int]] = [
            (self._stream, 6),
            (self._hang_up, 2),
            (self._other_key, 2),
            (self._nonsense, 1),
            (self._pages, 1),
        ]
        choices, weights = zip(*kinds, strict=True)
        while not self._is_over:
            # A new connection each time, and a pause in which the machine may rest.
            headers = {"authorization": f"Bearer {self._draw.choice(KEYS)}"}
            async with httpx.AsyncClient(
                base_url=self._url, timeout=120.0, headers=headers
            ) as client:
                (chosen,) = self._draw.choices(choices, weights)
                try:
                    self.told[await chosen(client)] += 1
                except httpx.HTTPError as error:
                    self.wrong.append(f"{chosen.__name__}: {type(error).__name__}: {error}")
            await thinks(self._draw.uniform(0.0, 1.0))

    def _kind(self) -> Kind:
        draw = self._draw
        prompt = [draw.randrange(100, 40_000) for _ in range(draw.randrange(20, 500))]
        how = {"temperature": draw.choice((0.0, 0.8)), "max_tokens": draw.randrange(1, 100)}
        common = {"model": _MODEL, "stream": True, "ignore_eos": True, "return_token_ids": True}
        return Kind("/v1/completions", {**common, **how, "prompt": prompt})

    async def _stream(self, client: httpx.AsyncClient) -> str:
        kind, asked = self._kind(), Asked("", "", 0.0)
        await ask(client, kind, asked)
        if asked.has_answer and len(asked.tokens) == kind.body["max_tokens"]:
            return "answered"
        self.wrong.append(f"{len(asked.tokens)} tokens, {asked.errors or asked.broken}")
        return "stream broken"

    async def _hang_up(self, client: httpx.AsyncClient) -> str:
        kind = self._kind()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._draw.uniform(0.01, 2.0)):
                await ask(client, kind, Asked("", "", 0.0))
        return "hung up"

    async def _other_key(self, client: httpx.AsyncClient) -> str:
        key = f"{self._draw.randrange(10**12):x}"
        headers = {"authorization": f"Bearer {key}"}
        return await self._expect(client, 401, json=self._kind().body, headers=headers)

    async def _nonsense(self, client: httpx.AsyncClient) -> str:
        return await self._expect(client, 400, content=self._draw.randbytes(200))

    async def _expect(self, client: httpx.AsyncClient, status: int, **what: object) -> str:
        answer = await client.post("/v1/completions", **what)  # type: ignore[arg-type]
        if answer.status_code != status:
            self.wrong.append(f"{answer.status_code} instead of {status}: {answer.text[:200]}")
        return f"refused with {status}"

    async def _pages(self, client: httpx.AsyncClient) -> str:
        for path in ("/v1/models", "/health", "/metrics"):
            answer = await client.get(path)
            # Neither is well while an engine or the parent is started again.
            if answer.status_code not in (200, 503):
                self.wrong.append(f"{path}: {answer.status_code}")
        return "pages read"
