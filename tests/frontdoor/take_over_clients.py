"""Clients that ask while one server replaces another, and what must hold of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx

from banaserve.base.platform.run_dir import find_admin
from banaserve.frontdoor.admin_client import AdminClient
from observing import until
from server_run import Run
from streams import Answer, Kind, asked, connected

MODEL = "smollm2-135m"
NUM_STREAMS = 4
STREAM_TOKENS = 300
FRESH = 20
"""The client that opens a connection for each request."""
TOOK_OVER = "took the front door over from process"


@dataclass
class Asked:
    """A request that has been answered.

    Attributes:
        sent_s, ended_s: On this process's clock.
    """

    name: str
    sent_s: float
    ended_s: float
    answer: Answer
    is_long: bool = False


@dataclass
class Clients:
    """They ask one request after the other until told to stop: streams, and short answers.

    Attributes:
        errors: Of requests that had no answer.
    """

    url: str
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    answers: list[Asked] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    async def run(self, server: Run) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(NUM_STREAMS):
                group.create_task(self._ask_over_one(server, number))
            for number in range(10, 12):
                group.create_task(self._ask_over_one(server, number, short=True))
            group.create_task(self._ask(None, FRESH, short=True))

    async def _ask_over_one(self, server: Run, client: int, short: bool = False) -> None:
        """A pool of its own, so that a client has one connection and no other's."""
        async with connected(server, keeps=True) as kept:
            await self._ask(kept, client, short)

    async def _ask(self, kept: httpx.AsyncClient | None, client: int, short: bool = False) -> None:
        """Ask over connections that are kept open, or over a new one each time."""
        number = 0
        while not self.stop.is_set():
            name = f"client{client}-request{number}-"
            kind = short_kind(name) if short else stream_kind(client, name)
            sent_s = time.monotonic()
            try:
                if kept is not None:
                    answer = await asked(kept, kind)
                else:
                    async with httpx.AsyncClient(base_url=self.url, timeout=180.0) as fresh:
                        answer = await asked(fresh, kind)
            except httpx.HTTPError as error:
                self.errors.append(f"{name} {type(error).__name__}: {error}")
            else:
                ended_s = time.monotonic()
                self.answers.append(Asked(name, sent_s, ended_s, answer, not short))
                if answer.error:
                    self.errors.append(f"{name} {answer.error}")
            number += 1


def stream_kind(client: int, name: str = "") -> Kind:
    body = {"model": MODEL, "prompt": f"Story {client} begins:", "max_tokens": STREAM_TOKENS}
    more = {"stream": True, "ignore_eos": True, "return_token_ids": True, "temperature": 0.0}
    return Kind("/v1/completions", {**body, **more, "request_id": name})


def short_kind(name: str) -> Kind:
    body = {"model": MODEL, "prompt": "One word:", "max_tokens": 2, "temperature": 0.0}
    return Kind("/v1/completions", {**body, "stream": True, "request_id": name})


def replaced_unnoticed(old: Run, claim: Callable[[], Run]) -> None:
    """Replace a server under clients; none of them, and nothing that is left, tells of it.

    Args:
        claim: Starts the server that replaces the old one.
    """

    async def expected() -> dict[int, Answer]:
        async with connected(old) as client:
            found = [await asked(client, stream_kind(number)) for number in range(NUM_STREAMS)]
        return dict(enumerate(found))

    async def replaced() -> tuple[Clients, Run, float]:
        clients = Clients(old.url)
        asking = asyncio.create_task(clients.run(old))
        new = claim()
        await asyncio.to_thread(new.wait_for, "Ctrl-C ends it.")
        took_over_s = time.monotonic()
        before = len(clients.answers)
        await asyncio.to_thread(until, old.is_gone, "the old server has ended")
        await asyncio.to_thread(
            until,
            lambda: sum(one.is_long for one in clients.answers[before:]) > 2 * NUM_STREAMS,
            "the new one answers",
        )
        clients.stop.set()
        await asking
        return clients, new, took_over_s

    wanted = asyncio.run(expected())
    pid = old.process.pid
    clients, new, took_over_s = asyncio.run(replaced())
    assert not clients.errors, clients.errors
    streams = [one for one in clients.answers if one.is_long]
    for one in streams:
        number = int(one.name.removeprefix("client").split("-")[0])
        assert one.answer.tokens == wanted[number].tokens, one.name
        assert one.answer.ends == {0: ["length"]}, one.name

    ids = " ".join(one.id for one in requests(new))
    by_new = {one.name for one in clients.answers if one.name in ids}
    late = {one.name for one in clients.answers if one.sent_s > took_over_s}
    # A connection on which an answer was under way may bring the old server one more request.
    strays = late - by_new
    assert not [name for name in strays if name.startswith(f"client{FRESH}-")]
    assert len({name.split("-")[0] for name in strays}) == len(strays)
    assert {one.name for one in streams} & late & by_new
    # Not when it was answered: the new server may be slow to, and streams of the old one end.
    first_by_new_s = min(one.sent_s for one in clients.answers if one.name in by_new)
    kept_by_old = [s for s in streams if s.name not in by_new and s.ended_s > first_by_new_s]
    assert kept_by_old, "no stream was under way when the server was replaced"

    assert old.process.returncode == 0
    assert old.errors.read_text() == ""
    old.check_nothing_left()
    assert f"{TOOK_OVER} {pid}" in new.printed()
    assert f"process {new.process.pid} has taken the front door over" in old.printed()
    assert serves(new)
    assert new.end() == 0


def serves(server: Run) -> bool:
    """Whether the server of this run directory is the one that answers on its port."""
    answer = server.post("/v1/completions", {**short_kind("who").body, "stream": False})
    assert answer.status_code == 200
    return answer.json()["id"] in " ".join(one.id for one in requests(server))


def requests(server: Run) -> list:
    return AdminClient(*find_admin(server.run_dir)).requests()
