"""Streamed answers of every kind, and which of them are not those that were expected."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import statistics
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from observing import until, writers
from server_run import Run

DEADLINE_S = 180.0


@dataclass
class Answer:
    """A streamed answer, by the index of its sequence."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    thoughts: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    ends: dict[int, list[str]] = field(default_factory=dict)
    error: str = ""

    def add(self, choice: dict[str, Any]) -> None:
        index, delta = choice["index"], choice.get("delta") or {}
        self.tokens.setdefault(index, []).extend(choice.get("token_ids") or [])
        calls = delta.get("tool_calls") or []
        called = "".join((call.get("function") or {}).get("arguments") or "" for call in calls)
        text = choice.get("text") or delta.get("content") or called
        self.texts[index] = self.texts.get(index, "") + text
        self.thoughts[index] = self.thoughts.get(index, "") + (delta.get("reasoning") or "")
        logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or []
        self.logprobs.setdefault(index, []).extend(round(one, 3) for one in logprobs)
        if choice.get("finish_reason"):
            self.ends.setdefault(index, []).append(choice["finish_reason"])

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens.values()))


@dataclass(frozen=True)
class Kind:
    """A kind of request: where it goes and what it says."""

    path: str
    body: dict[str, Any]

    def behind(self, words: str) -> Kind:
        """The same with other words in front, which no cache knows."""
        body = dict(self.body)
        if "messages" in body:
            (message,) = body["messages"]
            body["messages"] = [{**message, "content": f"{words} {message['content']}"}]
        else:
            body["prompt"] = [ord(letter) for letter in words] + body["prompt"]
        return Kind(self.path, body)


def greedy(num: int, first: int, num_tokens: int = 48) -> dict[str, Kind]:
    """Different prompts of 301 tokens; ``first`` sets them apart from those of other tests."""
    body = {
        "model": "smollm2-135m",
        "max_tokens": num_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    prompts = [[100 + first + n, *range(200 + 7 * n, 500 + 7 * n)] for n in range(num)]
    return {
        str(n): Kind("/v1/completions", {**body, "prompt": prompt})
        for n, prompt in enumerate(prompts)
    }


async def asked(
    client: httpx.AsyncClient, kind: Kind, seen: Callable[[Answer], None] = lambda _: None
) -> Answer:
    """Stream one answer; ``seen`` gets what has come of it at each of its chunks."""
    answer = Answer()
    async with client.stream("POST", kind.path, json=kind.body) as response:
        if response.status_code != 200:
            answer.error = (await response.aread()).decode()
        async for line in response.aiter_lines():
            data = line.removeprefix("data: ")
            if data == line or data == "[DONE]":
                continue
            chunk = json.loads(data)
            if "error" in chunk:
                answer.error = data
            for choice in chunk.get("choices", ()):
                answer.add(choice)
            seen(answer)
    return answer


class Gaps:
    """Times between the chunks of streams, in seconds."""

    def __init__(self) -> None:
        self._found: list[float] = []

    async def asked(self, client: httpx.AsyncClient, kind: Kind) -> Answer:
        """Stream one answer and note its gaps."""
        at: list[float] = []
        answer = await asked(client, kind, lambda _: at.append(time.monotonic()))
        self._found += [late - early for early, late in itertools.pairwise(at)]
        return answer

    def __str__(self) -> str:
        longest, median = max(self._found), statistics.median(self._found)
        return f"longest gap {longest:.3f} s, median {median:.4f} s: {longest / median:.0f} times"


@contextlib.asynccontextmanager
async def connected(server: Run, *, keeps: bool = False) -> AsyncIterator[httpx.AsyncClient]:
    """A client of ``server``.

    Args:
        keeps: Its connections stay open between requests. The server closes one that is idle for
            5 s: a client that is kept from running for as long may send to it just then.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None if keeps else 0)
    async with httpx.AsyncClient(base_url=server.url, timeout=DEADLINE_S, limits=limits) as client:
        yield client


async def asked_all(
    server: Run, kinds: dict[str, Kind], seen: Callable[[Answer], None] = lambda _: None
) -> dict[str, Answer]:
    async with connected(server) as client:
        answers = await asyncio.gather(*(asked(client, kind, seen) for kind in kinds.values()))
    return dict(zip(kinds, answers, strict=True))


def differences(
    kinds: dict[str, Kind], expected: dict[str, Answer], found: dict[str, Answer]
) -> dict[str, tuple[Answer, Answer]]:
    """Kinds whose answers differ; of one that draws without a seed its form alone is compared."""
    wrong = {}
    for name in kinds:
        wanted, got = expected[name], found[name]
        if name == "unseeded":
            is_right = not got.error and got.ends == wanted.ends
            is_right = is_right and got.num_tokens == wanted.num_tokens
        else:
            is_right = got == wanted
        if not is_right:
            wrong[name] = (wanted, got)
    return wrong


def back(server: Run, name: str, pid: int) -> None:
    """Return when another process serves in the place of the one that was killed."""
    log = f"{name}.log"
    until(
        lambda: {other for at, other in writers(server.run_dir) if at == log} - {pid} != set(),
        f"{name} is started again",
    )
    if name == "kvstore":
        until(lambda: server.metric("banaserve_kvstore_up") == 1, "the store answers")
    else:
        until(
            lambda: server.metric("banaserve_instance_ready", instance_id=name) == 1,
            f"{name} is back",
        )
