"""Two regions of real engines behind balancers, and clients that account for every token."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from banaserve_bench.loadgen.servers import Server
from banaserve_route.balancer.config import BalancerSettings
from banaserve_route.policies.interface import Need
from banaserve_route.policies.registry import POLICIES
from fork_server import ForkServer
from ports import free_port
from region_link import RegionLink
from server_run import Run
from waiting import thinks, until

REGIONS = {"eu": ("e0", "e1"), "us": ("u0",)}
OTHER = {"eu": "us", "us": "eu"}
HOMES = ("eu", "us", "us", "eu", "us", "us", "eu", "us")
"""Homes of the clients, and of the conversations in turn.

In `us` there are more clients than its replica takes requests at once, in `eu` more than one of its
two replicas takes: all replicas are busy, and `us` has requests for which only `eu` has room.
"""
MOST_AT_ONCE = 2
"""Maximum number of requests that a balancer has at one replica."""
SAMPLING = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}

_LINK_DELAY_S = 0.005
_MODEL = "smollm2-135m"
_OPTIONS = ("--colocated", "1", "--no-kv-store", "--dtype", "float32", "--max-model-len", "2048")
_DEADLINE_S = 180.0

Conversation = Sequence[list[int]]
"""Prompts of a client, in tokens, each asked when the one before is answered."""


def region_of(replica: str) -> str:
    return next(region for region, replicas in REGIONS.items() if replica in replicas)


def conversations(num_requests: int, seed: int) -> list[Conversation]:
    """Return two loads in one random order: half of the requests are turns of sessions.

    Sessions of four turns begin with a prefix that all share, longer than a KV block, and each turn
    continues the one before. The other requests are conversations of one, with nothing in common.
    """
    draws = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [draws.randrange(100, 40_000) for _ in range(count)]

    shared, made = tokens(150), []
    for _ in range(num_requests // 8):
        last = [*shared, *tokens(160)]
        made.append([last[: 190 + 40 * turn] for turn in range(4)])
    made += [[tokens(draws.randrange(20, 160))] for _ in range(num_requests - 4 * len(made))]
    draws.shuffle(made)
    return made


class Engines:
    """Replicas of one real engine each. Their answers name them as the model that has answered.

    Attributes:
        runs: Servers that live, by the name of the replica.
    """

    def __init__(self, serve: Callable[..., Run]) -> None:
        self._serve = serve
        self._ports = {name: free_port() for names in REGIONS.values() for name in names}
        self.runs: dict[str, Run] = {}

    def start(self) -> None:
        """Start the replicas that are dead; return when all serve."""
        for name in (name for name in self._ports if name not in self.runs):
            named = ("--served-model-name", name, _MODEL)
            self.runs[name] = self._serve(*_OPTIONS, *named, port=self._ports[name])

    def settings(self, region: str) -> list[dict[str, str]]:
        """Return the settings of a region's replicas."""
        return [
            {"id": name, "url": f"http://127.0.0.1:{self._ports[name]}"} for name in REGIONS[region]
        ]

    def num_computed(self) -> Counter[str]:
        """Return the number of answers that each living engine has computed to their end."""
        counted = {"name": "vllm:request_success_total", "finished_reason": "length"}
        return Counter({name: int(run.metric(**counted)) for name, run in self.runs.items()})


class Balancers:
    """A balancer of the product in each region, started by ``async with``.

    Attributes:
        is_forwarding: True if the policy sends requests to the other region.
        urls: Addresses by region.
    """

    def __init__(self, policy: str, engines: Engines, forks: ForkServer, folder: Path) -> None:
        """``policy`` is empty for the default of ``banaserve route``."""
        self._policy, self._engines, self._forks, self._folder = policy, engines, forks, folder
        name = policy or BalancerSettings().policy.name
        self.is_forwarding = Need.PEERS in POLICIES.get(name).needs
        self.urls = {region: f"http://127.0.0.1:{free_port()}" for region in REGIONS}
        self._living: dict[str, Any] = {}

    async def __aenter__(self) -> Balancers:
        async with AsyncExitStack() as stack:
            for region, url in self.urls.items():
                to_port = int(self.urls[OTHER[region]].rpartition(":")[2])
                link = await RegionLink(to_port, _LINK_DELAY_S).start()
                stack.callback(link.stop)
                self._living[region] = process = self._start(region, url, link.url)
                stack.callback(process.wait)
                stack.callback(process.send_signal, signal.SIGKILL)
            for region in REGIONS:
                # In a thread: what they ask each other at first passes through the links here.
                await asyncio.to_thread(self._server(region).wait_ready)
                num_targets = len(REGIONS[region]) + self.is_forwarding
                await self.until(region, "available", lambda now, most=num_targets: now == most)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def stop(self, region: str) -> None:
        self._living[region].send_signal(signal.SIGSTOP)

    def kill(self, region: str) -> None:
        self._living.pop(region).send_signal(signal.SIGKILL)

    async def end(self) -> None:
        """End those that live, as a user does, when they have nothing more under way."""
        for region, process in self._living.items():
            await self.until(region, "outstanding", lambda now: now == 0)
            process.send_signal(signal.SIGTERM)
            assert process.wait(_DEADLINE_S) == 128 + signal.SIGTERM

    async def until(
        self, region: str, gauge: str, holds: Callable[[float], bool], **labels: str
    ) -> None:
        """Return when the sum of a gauge over the targets of a living balancer is as it should."""
        name, server = f"banaserve_route_target_{gauge}", self._server(region)
        await until(lambda: holds(server.metric(name, **labels)))

    def _server(self, region: str) -> Server:
        return Server(self._living[region], self.urls[region], self._folder / f"{region}.log")

    def _start(self, region: str, url: str, peer_url: str) -> Any:
        there, replicas = OTHER[region], self._engines.settings
        settings: dict[str, Any] = {
            "region": region,
            "port": int(url.rpartition(":")[2]),
            "peer_key": "between-us",
            "replicas": replicas(region),
            "peers": [{"region": there, "url": peer_url, "replicas": replicas(there)}],
            "limits": {"max_outstanding": MOST_AT_ONCE},
            "health": {"interval_s": 0.2, "breaker_pause_s": 0.2},
        }
        if self._policy:
            settings["policy"] = {"name": self._policy}
        path = self._folder / f"{region}.yaml"
        path.write_text(json.dumps(settings))
        with path.with_suffix(".log").open("wb") as out:
            words = ["banaserve", "route", "--config", str(path)]
            return self._forks.start(words, os.environ, out.fileno(), out.fileno())


@dataclass(frozen=True, slots=True)
class Answer:
    """A stream that has ended without an error.

    Attributes:
        asked: Region of the balancer that was asked.
        origins: Replica and stream of each event; a whole answer has one pair.
        endings: Reasons why the answer ended; a whole answer has one.
    """

    asked: str
    tokens: list[int]
    origins: set[tuple[str, str]]
    endings: list[str]

    @property
    def replica(self) -> str:
        ((replica, _),) = self.origins
        return replica


@dataclass(slots=True)
class Request:
    """A turn of a conversation, and what its client has got.

    Attributes:
        bound_to: Region that alone may serve the request; empty for all.
        answers: Answers that its client has taken for whole.
        failures: Attempts that failed: region of the balancer, and kind.
    """

    prompt: list[int]
    bound_to: str
    answers: list[Answer] = field(default_factory=list)
    failures: list[tuple[str, str]] = field(default_factory=list)


class Load:
    """Clients of both regions. Each asks at home, and elsewhere when it gets no whole answer.

    Attributes:
        requests: All requests by the home of their client.
        num_under_way: Number of attempts without an end yet, by region of the balancer.
    """

    def __init__(self, urls: dict[str, str], asked: Sequence[Conversation], bound_to: str) -> None:
        """Bind some conversations of clients in ``bound_to`` to that region."""
        self._urls = urls
        self.num_under_way = Counter[str]()
        self._left: dict[str, deque[list[Request]]] = {region: deque() for region in REGIONS}
        for number, prompts in enumerate(asked):
            home = HOMES[number % len(HOMES)]
            bound = home if home == bound_to and number % 5 == 0 else ""
            self._left[home].append([Request(prompt, bound) for prompt in prompts])
        self.requests = {home: [one for each in self._left[home] for one in each] for home in OTHER}

    async def run(self, region: str, harm: Callable[[Load], Awaitable[None]]) -> list[Request]:
        """Return all requests, answered; ``harm`` is done after a third of those of ``region``."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with (
            asyncio.timeout(_DEADLINE_S),
            httpx.AsyncClient(timeout=_DEADLINE_S, limits=limits) as client,
            asyncio.TaskGroup() as group,
        ):
            for home in HOMES:
                group.create_task(self._converse(client, home))
            some = self.requests[region]
            await until(lambda: 3 * sum(len(one.answers) for one in some) >= len(some), _DEADLINE_S)
            await harm(self)
        return [one for each in self.requests.values() for one in each]

    async def _converse(self, client: httpx.AsyncClient, home: str) -> None:
        while self._left[home]:
            for request in self._left[home].popleft():
                region = home
                while failure := await self._ask(client, region, request):
                    request.failures.append((region, failure))
                    region = OTHER[region]
                    await thinks(0.02)

    async def _ask(self, client: httpx.AsyncClient, region: str, request: Request) -> str:
        """Ask once; return what went wrong, or an empty string."""
        self.num_under_way[region] += 1
        try:
            return await self._ask_once(client, region, request)
        finally:
            self.num_under_way[region] -= 1

    async def _ask_once(self, client: httpx.AsyncClient, region: str, request: Request) -> str:
        body = {"model": _MODEL, "prompt": request.prompt, **SAMPLING}
        body |= {"stream": True, "return_token_ids": True}
        fields = {"X-Banaserve-Regions": request.bound_to} if request.bound_to else {}
        lines: list[str] = []
        try:
            url = f"{self._urls[region]}/v1/completions"
            async with client.stream("POST", url, json=body, headers=fields) as response:
                if response.status_code != 200:
                    return str(response.status_code)
                lines = [line async for line in response.aiter_lines() if line]
        except httpx.ConnectError:
            return "refused"
        except httpx.TransportError:
            return "cut"
        except AttributeError as error:
            if "getpeername" not in str(error):
                raise
            return "refused"  # anyio asks for the peer of a connection that was reset at once
        if lines[-1] != "data: [DONE]":
            assert "error" in json.loads(lines[-1].removeprefix("data: ")), lines
            return "cut"
        events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
        choices = [choice for event in events for choice in event["choices"]]
        request.answers.append(
            Answer(
                region,
                [token for choice in choices for token in choice["token_ids"] or ()],
                {(event["model"], event["id"]) for event in events},
                [choice["finish_reason"] for choice in choices if choice["finish_reason"]],
            )
        )
        return ""
