"""Rolling restarts that are waited for, and streams that ask the server meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

import httpx

from banaserve.base.platform.run_dir import find_admin
from banaserve.contracts.restart_api import RestartRequest, RollingRestart
from banaserve.frontdoor.admin_client import AdminClient
from observing import writer
from server_run import Run
from streams import Answer, Gaps, Kind, connected, differences

NUM_STREAMS = 6


class Load:
    """Streams that are asked again and again until it ends.

    Attributes:
        answers: With the name of their kind, in the order of their ends.
        changed: Notified of each.
    """

    def __init__(
        self, client: httpx.AsyncClient, kinds: dict[str, Kind], num_streams: int = NUM_STREAMS
    ) -> None:
        self.answers: list[tuple[str, Answer]] = []
        self._kinds = kinds
        self._num_streams = num_streams
        self.changed = asyncio.Condition()
        self._gaps = Gaps()
        self._stop = asyncio.Event()
        self._tasks = [
            asyncio.create_task(self._stream(client, number)) for number in range(num_streams)
        ]

    async def _stream(self, client: httpx.AsyncClient, number: int) -> None:
        names = list(self._kinds)
        while not self._stop.is_set():
            name = names[number % len(names)]
            number += self._num_streams + 1
            answer = await self._gaps.asked(client, self._kinds[name])
            async with self.changed:
                self.answers.append((name, answer))
                self.changed.notify_all()

    async def reaches(self, num_more: int) -> None:
        """Return when so many more have been answered."""
        wanted = len(self.answers) + num_more
        reached = asyncio.create_task(self._reached(wanted))
        await asyncio.wait({reached, *self._tasks}, return_when=asyncio.FIRST_COMPLETED)
        if not reached.done():
            reached.cancel()
            await asyncio.gather(*(task for task in self._tasks if task.done()))

    async def _reached(self, wanted: int) -> None:
        async with self.changed:
            await self.changed.wait_for(lambda: len(self.answers) >= wanted)

    async def end(self) -> None:
        self._stop.set()
        await asyncio.gather(*self._tasks)
        print(f"\n{len(self.answers)} answers, {self._gaps}")


@asynccontextmanager
async def loaded(
    server: Run, kinds: dict[str, Kind], num_streams: int = NUM_STREAMS
) -> AsyncIterator[Load]:
    async with connected(server) as client:
        load = Load(client, kinds, num_streams)
        try:
            yield load
        finally:
            await load.end()


def admin_of(server: Run) -> AdminClient:
    return AdminClient(*find_admin(server.run_dir))


def restarted(
    server: Run, ask: RestartRequest, seen: Callable[[RollingRestart], None] = lambda _: None
) -> RollingRestart:
    """Begin a restart and return when it has ended; ``seen`` is given it now and then."""
    admin = admin_of(server)
    found = admin.restarts.begin(ask)
    while found.is_open:
        seen(found)
        found = admin.restarts.show(found.id, wait_s=0.2)
    return found


def pids_of(server: Run, names: Iterable[str]) -> set[int]:
    return {writer(server.run_dir, name) for name in names}


def is_wrong(
    kinds: dict[str, Kind], expected: dict[str, Answer], kind: str, answer: Answer
) -> bool:
    return bool(differences({kind: kinds[kind]}, expected, {kind: answer}))
