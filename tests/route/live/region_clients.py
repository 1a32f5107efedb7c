"""Clients of balancers in several regions, which account for every request."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import monotonic

from region_processes import ANSWER_S, HOME_ONLY, REGIONS, World
from waiting import thinks


@dataclass(slots=True)
class Told:
    """A client's view of one request.

    Attributes:
        num_answers: Number of whole answers; the client asks until there is one.
        num_broken: Number of attempts that ended otherwise, by kind.
    """

    name: str
    region: str
    may_leave: bool
    sent_s: float
    first_s: float = 0.0
    done_s: float = 0.0
    num_answers: int = 0
    num_broken: Counter[str] = field(default_factory=Counter)


class ClientLoad:
    """Clients of every region, each with conversations of some turns, one request at a time.

    Attributes:
        told: All requests, in the order of their sending.
    """

    def __init__(
        self, world: World, clients: Mapping[str, int], seed: int, output_tokens: int = 48
    ) -> None:
        self.world = world
        self._output_tokens = output_tokens
        self.told: list[Told] = []
        self._is_over = False
        self._answered = asyncio.Event()
        self._tasks = [
            asyncio.create_task(
                self._client(name, number, random.Random(f"{seed}/{name}/{number}"))
            )
            for name in REGIONS
            for number in range(clients[name])
        ]

    @property
    def num_answers(self) -> int:
        return sum(one.num_answers for one in self.told)

    async def more(self, count: int, timeout_s: float = 120.0) -> None:
        """Return when ``count`` more answers have come.

        Raises:
            TimeoutError: The answers did not come in time.
            Exception: A client ended with this exception.
        """
        until = self.num_answers + count
        async with asyncio.timeout(timeout_s):
            while self.num_answers < until:
                for task in self._tasks:
                    if task.done():
                        task.result()
                self._answered.clear()
                await self._answered.wait()

    async def end(self, timeout_s: float = 120.0) -> None:
        """Send nothing more and return when all requests that were sent are answered."""
        self._is_over = True
        await asyncio.wait_for(asyncio.gather(*self._tasks), timeout_s)

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _client(self, home: str, number: int, draw: random.Random) -> None:
        is_bound = home == HOME_ONLY and number % 3 == 0
        key = "home" if is_bound else "any"
        while not self._is_over:
            history = f"{draw.randbytes(600).hex()} "
            for _ in range(draw.randrange(1, 5)):
                if self._is_over:
                    return
                name = f"{home}-{number}-{len(self.told)}"
                told = Told(name, home, not is_bound, monotonic())
                self.told.append(told)
                history += f"{draw.randbytes(100).hex()} "
                await self._until_answered(told, f"{history}{name}", key, draw)
                self._answered.set()

    async def _until_answered(self, told: Told, prompt: str, key: str, draw: random.Random) -> None:
        order = [told.region, *sorted(set(REGIONS) - {told.region})]
        attempt = 0
        while not told.num_answers:
            kind = await self._try(told, order[attempt % len(order)], prompt, key)
            if kind:
                told.num_broken[kind] += 1
                attempt += 1
                await thinks(0.05 + 0.1 * draw.random())

    async def _try(self, told: Told, name: str, prompt: str, key: str) -> str:
        """Ask once; return what went wrong, or an empty string."""
        body = json.dumps(
            {"prompt": prompt, "max_tokens": self._output_tokens, "stream": True}
        ).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: b\r\nConnection: close\r\n"
            f"Authorization: Bearer {key}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        try:
            port = self.world.port(told.region, name)
            answer, first_s = await _first_and_rest(port, head.encode() + body)
        except (OSError, TimeoutError):
            return "broken"
        status = answer[9:12].decode("latin-1")
        if status != "200":
            return status or "nothing"
        if not answer.endswith(b"0\r\n\r\n") or f" {told.name}".encode() not in answer:
            return "cut"
        told.first_s, told.done_s = first_s, monotonic()
        told.num_answers += 1
        return ""


async def _first_and_rest(port: int, request: bytes) -> tuple[bytes, float]:
    """Return an answer and the time of its first byte."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        async with asyncio.timeout(ANSWER_S):
            begin = await reader.read(1)
            first_s = monotonic()
            return begin + await reader.read(), first_s
    finally:
        writer.transport.abort()
