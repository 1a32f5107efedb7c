"""Streams that ask for the same answers again and again, from a thread of their own."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import httpx

from observing import until
from server_run import Run
from streams import Answer, Kind, asked, connected


class AskedAgain:
    """Until the end of its block ``num_streams`` streams ask for all kinds in turn.

    Attributes:
        answers: With the place of each one's kind.
    """

    def __init__(self, server: Run, kinds: Sequence[Kind], num_streams: int) -> None:
        self._server = server
        self._kinds = kinds
        self._num_streams = num_streams
        self._places = itertools.cycle(range(len(kinds)))
        self._ends = threading.Event()
        self._pool = ThreadPoolExecutor(1)
        self._asking: Future[None] | None = None
        self.answers: list[tuple[int, Answer]] = []

    def __enter__(self) -> AskedAgain:
        self._asking = self._pool.submit(lambda: asyncio.run(self._ask_all()))
        return self

    def __exit__(self, _kind: object, failure: BaseException | None, _trace: object) -> None:
        self._ends.set()
        assert self._asking is not None
        with self._pool:
            streams_failed = self._asking.exception()
        if streams_failed is None:
            return
        if failure is None:
            raise streams_failed
        # Raised here, it would hide the block's own failure.
        failure.add_note(f"its streams failed: {streams_failed!r}")

    def comes_to(self, count: int) -> None:
        """Return when so many have been answered."""
        assert self._asking is not None
        asking = self._asking
        until(lambda: len(self.answers) >= count or asking.done(), f"{count} answers")
        assert not asking.done(), asking.exception()

    def goes_on(self) -> None:
        """Return when as many have been answered as one that begins now may come behind."""
        self.comes_to(len(self.answers) + 2 * self._num_streams)

    async def _ask_all(self) -> None:
        async with connected(self._server) as client:
            await asyncio.gather(*(self._stream(client) for _ in range(self._num_streams)))

    async def _stream(self, client: httpx.AsyncClient) -> None:
        while not self._ends.is_set():
            place = next(self._places)
            self.answers.append((place, await asked(client, self._kinds[place])))

    def check(self, expected: Sequence[list[int]]) -> None:
        """Every answer has the tokens that are expected of its kind."""
        assert len(self.answers) >= self._num_streams
        assert [answer.error for _, answer in self.answers if answer.error] == []
        assert all(answer.tokens[0] == expected[place] for place, answer in self.answers)
