"""Scalings of a server that are waited for, and streams that ask it meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx

from banaserve.contracts.control_api import ScaleRequest
from banaserve.contracts.instances import Scaling
from banaserve.frontdoor.admin_client import AdminClient
from observing import until, writers
from server_run import Run
from streams import Answer, Gaps, Kind, connected, differences


def ids_of(admin: AdminClient) -> list[str]:
    return [one.id for one in admin.status().instances]


def ended(admin: AdminClient, scaling: Scaling) -> Scaling:
    found = scaling

    def has_ended() -> bool:
        nonlocal found
        found = admin.scalings.show(scaling.id, wait_s=5.0)
        return not found.is_open

    until(has_ended, "the scaling has ended")
    return found


def scaled(admin: AdminClient, prefill: int, decode: int) -> Scaling:
    done = ended(admin, admin.scalings.begin(ScaleRequest(prefill, decode)))
    assert (done.state, done.reason) == ("done", "")
    return done


def has_served(server: Run, name: str) -> bool:
    return server.metric("banaserve_scheduled_requests_total", instance_id=name) > 0


def one_of_each_again(admin: AdminClient) -> None:
    """Let one instance of each role be left, and none drained."""
    for one in admin.status().instances:
        if one.state == "drained":
            admin.release(one.id)
    scaled(admin, 1, 1)


def started(server: Run, name: str) -> int:
    """The process of an instance that is being added."""
    pids: list[int] = []

    def is_there() -> bool:
        pids.extend(pid for log, pid in writers(server.run_dir) if log == f"{name}.log")
        return bool(pids)

    until(is_there, f"{name} has a process")
    return pids[0]


def series_of(server: Run, names: Sequence[str]) -> list[str]:
    """Lines of the metrics that are of instances of these names."""
    lines = server.get("/metrics").text.splitlines()
    return [line for line in lines if any(f'"{name}"' in line for name in names)]


class Streams:
    """Streams of every kind, one after the other, from several clients at once."""

    def __init__(self, server: Run, kinds: dict[str, Kind], expected: dict[str, Answer]) -> None:
        self._server, self._kinds, self._expected = server, kinds, expected
        self.wrong: list[Any] = []
        self.num_answers = Counter[str]()
        self._gaps = Gaps()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        stop = asyncio.Event()
        async with connected(self._server) as client:
            streams = [
                asyncio.create_task(self._stream(client, number, stop))
                for number in range(len(self._kinds))
            ]
            yield
            stop.set()
            await asyncio.gather(*streams)
        print(f"\n{self.num_answers.total()} answers, {self._gaps}")

    async def _stream(self, client: httpx.AsyncClient, number: int, stop: asyncio.Event) -> None:
        names = list(self._kinds)
        while not stop.is_set():
            name = names[number % len(names)]
            number += 1
            found = {name: await self._gaps.asked(client, self._kinds[name])}
            self.num_answers[name] += 1
            kind = {name: self._kinds[name]}
            self.wrong.extend(differences(kind, self._expected, found).items())
