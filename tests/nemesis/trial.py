"""Trial of a server: faults by turns under streams, and whether the server keeps its promises."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx

from depth import chosen_seed
from faults import Choice, Nemesis
from history import Asked, Fault, History, met, violations
from load import Load, ask
from server_run import Run
from service import Service
from streams import Kind

NUM_CLIENTS = 4
_BEGUN_S = 120.0


def kinds(num_tokens: int) -> dict[str, Kind]:
    """Requests of random prompts, greedy and seeded by turns.

    Args:
        num_tokens: Length of the answers.
    """
    draw = random.Random(chosen_seed(7))
    common = {"model": "smollm2-135m", "stream": True, "return_token_ids": True}
    common |= {"stream_options": {"include_usage": True}}
    length = {"max_tokens": num_tokens, "ignore_eos": True}
    found = {}
    for number in range(6):
        prompt = [draw.randrange(100, 40000) for _ in range(draw.randrange(40, 400))]
        how = {"temperature": 0.9, "seed": number} if number % 2 else {"temperature": 0.0}
        body = {**common, **length, **how, "prompt": prompt}
        found[f"k{number}"] = Kind("/v1/completions", body)
    return found


@dataclass(frozen=True)
class Trial:
    """A trial of one server.

    Attributes:
        service: The server.
        nemesis: Does the faults.
        kinds: Requests of the clients.
        ready_s: Time in which the server is to be whole again after a fault.
        url: Address that clients ask; empty for the server itself.
    """

    service: Service
    nemesis: Nemesis
    kinds: dict[str, Kind]
    ready_s: float
    url: str = ""

    def run(self, faults: Iterable[Choice], until_s: float = float("inf")) -> None:
        """Do faults under streams, then compare all that was answered; prints what has happened.

        Args:
            until_s: Moment of the monotonic clock after which no fault begins.

        Raises:
            AssertionError: A promise was broken.
        """
        expected = asyncio.run(answers(self.service.run, self.kinds))
        history = History()
        load = Load(self.url or self.service.run.url, self.kinds, history)
        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(load.run, NUM_CLIENTS)
            try:
                timely = itertools.takewhile(lambda _: time.monotonic() <= until_s, faults)
                for choice in timely:
                    self._strike(choice, history)
            except AssertionError as broken:
                broken.add_note(_told(history))
                raise
            finally:
                load.end()
                asking.result()
        told = _told(history)
        failed = [
            f"{one.id} ({met(one, history)}): {one.errors}"
            for one in history.requests
            if one.errors
        ]
        ends = f"{len(history.requests)} requests, {len(failed)} ended in an error"
        print("\n".join((told, ends, *failed)))
        assert violations(history, expected, self.ready_s) == [], told
        # Otherwise that nobody has found another's blocks would say nothing.
        assert any(one.cached_tokens for one in history.requests if not one.is_first)
        assert asyncio.run(answers(self.service.run, self.kinds)) == expected
        assert self.service.run.get("/health").status_code == 200

    def _strike(self, choice: Choice, history: History) -> None:
        _wait_for_answers(history, NUM_CLIENTS)
        fault = Fault(str(choice), time.monotonic(), cuts=choice.cuts, drains=choice.drains)
        history.faults.append(fault)
        if not self.nemesis.strike(choice):
            history.faults.remove(fault)
            return
        # A server that ends is started again by the nemesis: that counts, too.
        fault.over_s = None if choice.target == "server" else time.monotonic()
        self.nemesis.wait_whole(2 * self.ready_s)
        fault.ready_s = time.monotonic()


async def answers(server: Run, kinds: dict[str, Kind]) -> dict[str, list[int]]:
    """The right tokens: of a run without faults."""
    async with httpx.AsyncClient(base_url=server.url, timeout=120.0) as http:
        found = {}
        for name, kind in kinds.items():
            asked = Asked(name, name, 0.0)
            await ask(http, kind, asked)
            assert asked.has_answer, asked
            found[name] = asked.tokens
        return found


def _told(history: History) -> str:
    return "\n".join(f"{one.name}: {_words(one)}" for one in history.faults)


def _words(fault: Fault) -> str:
    began_s = fault.over_s or fault.at_s
    return "never whole again" if fault.ready_s is None else f"{fault.ready_s - began_s:.1f} s"


def _wait_for_answers(history: History, num: int) -> None:
    """Let so many requests begin, so that the next fault meets streams under way."""
    wanted, waited = len(history.requests) + num, threading.Event()
    until_s = time.monotonic() + _BEGUN_S
    while len(history.requests) < wanted and time.monotonic() < until_s:
        waited.wait(0.05)
