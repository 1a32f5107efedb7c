"""One balancer: who may ask, where requests go, and what is under way."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from time import monotonic

from banaserve.balancer import answers
from banaserve.balancer.asked import blind_request, read_request
from banaserve.balancer.client import Client
from banaserve.balancer.door import OPEN_PATHS, Keys, check_key, check_path
from banaserve.balancer.endpoint import parse_endpoint
from banaserve.balancer.exchange import Exchange
from banaserve.balancer.line import Line
from banaserve.balancer.message import Message, RefusedError
from banaserve.balancer.metrics import Metrics
from banaserve.balancer.prober import Prober
from banaserve.balancer.settings import BalancerSettings, ReplicaSettings
from banaserve.balancer.target import Target
from banaserve.errors import UserError
from banaserve.kvstore.sizes import parse_size
from banaserve.orchestrator.replicas import registry
from banaserve.orchestrator.replicas.fleet import Fleet
from banaserve.orchestrator.replicas.interface import (
    Decision,
    FleetView,
    ReplicaId,
    ReplicaView,
    Request,
)
from banaserve.types import RequestId

BLIND = frozenset(("round_robin", "random", "least_requests", "power_of_two"))
"""Policies that read neither prompts nor reports."""

Say = Callable[[str], None]


class Balancer:
    """Takes requests from clients and sends each to one replica.

    Everything runs in the callbacks of one event loop; nothing here waits.

    Attributes:
        is_leaving: No more requests are taken.
    """

    def __init__(self, settings: BalancerSettings, log: Say) -> None:
        """``log`` gets one line an event.

        Raises:
            UserError: The settings make no sense.
        """
        settings.check()
        self.settings, self.log = settings, log
        policy = settings.policy
        self.fleet = Fleet(
            registry.make(
                policy.name,
                random.Random(policy.seed),
                preset=policy.preset or None,
                **policy.options,
            ),
            settings.region,
        )
        self.line, self.metrics = Line(), Metrics()
        self.targets: dict[str, Target] = {}
        self.is_leaving = False
        self.max_body_bytes = parse_size(settings.limits.max_body)
        self.max_attempts = settings.limits.max_attempts
        self.max_queue = settings.limits.max_queue
        self._max_buffered_bytes = parse_size(settings.limits.max_buffered)
        self._buffered_bytes = 0
        self._keys = Keys(settings.api_keys)
        self._clients: set[Client] = set()
        self._under_way: dict[Exchange, None] = {}
        self._probers: dict[str, Prober] = {}
        self._num_requests = 0
        self._wakes = False
        self._idle: asyncio.Event | None = None
        self._is_blind = policy.name in BLIND and not any(one.models for one in settings.replicas)
        self.metrics.targets = self.targets.values
        self.metrics.line_length = lambda: len(self.line)
        self.metrics.num_under_way = lambda: len(self._under_way)
        for one in settings.replicas:
            self.add_replica(one)

    # Replicas.

    def add_replica(self, one: ReplicaSettings) -> Target:
        """Take in a replica; nothing is asked of it yet.

        Raises:
            UserError: It is there already, or its URL is none.
        """
        endpoint = parse_endpoint(one.url)
        for other in self.targets.values():
            if other.endpoint == endpoint:
                raise UserError(f"replica {one.url} is there twice: remove one")
        view = ReplicaView(
            ReplicaId(one.id or endpoint.authority),
            self.settings.region,
            frozenset(one.models),
            one.max_prompt_tokens,
        )
        self.fleet.add(view)
        limits, health = self.settings.limits, self.settings.health
        target = Target(
            view,
            endpoint,
            one.key or self.settings.replica_key,
            one.max_outstanding or limits.max_outstanding,
            health,
            limits.connect_timeout_s,
        )
        self.targets[view.id] = target
        reads_reports = self.settings.policy.name not in BLIND
        self._probers[view.id] = Prober(
            target, self.fleet, health, self._changed, self.wake, reads_reports
        )
        return target

    async def start(self) -> None:
        """Look at every replica once, then go on looking."""
        await asyncio.gather(*(prober.look() for prober in self._probers.values()))
        for target in self.targets.values():
            if target.num_failed_looks:
                target.is_healthy = False
                target.refresh(self.now_s())
                self.log(f"replica {target.endpoint.url} does not answer; looking again")
        for prober in self._probers.values():
            prober.start()

    def _changed(self, target: Target) -> None:
        state = "is back" if target.is_healthy else "does not answer"
        self.log(f"replica {target.endpoint.url} {state}")
        self.wake()

    # For connections of clients.

    def opened(self, client: Client) -> bool:
        self._clients.add(client)
        return len(self._clients) <= self.settings.limits.max_connections

    def closed(self, client: Client) -> None:
        self._clients.discard(client)

    def check_head(self, message: Message) -> None:
        if message.path in OPEN_PATHS:
            return
        check_key(self._keys, message)
        check_path(message.path)
        if len(self._under_way) >= self.settings.limits.max_requests:
            raise RefusedError(429, f"{len(self._under_way)} requests are under way; try again")

    def hold(self, num_bytes: int) -> None:
        self._buffered_bytes += num_bytes
        if num_bytes > 0 and self._buffered_bytes > self._max_buffered_bytes:
            self._buffered_bytes -= num_bytes
            raise RefusedError(503, "too many bodies are held in memory; try again shortly")

    def refused(self, error: RefusedError) -> None:
        self.metrics.refused(error.status)

    def take(self, client: Client, message: Message) -> Exchange | None:
        if message.path in OPEN_PATHS:
            client.write(self._own_answer(message, closes=not client.can_go_on))
            client.done(message)
            return None
        if message.is_http10 or self.is_leaving:
            client.can_go_on = False
        now_s, limits = self.now_s(), self.settings.limits
        self._num_requests += 1
        request_id = RequestId(str(self._num_requests))
        if self._is_blind:
            request = blind_request(request_id, now_s)
        else:
            request = read_request(request_id, message, now_s, None, False)
        exchange = Exchange(self, client, message, request, now_s + limits.request_timeout_s)
        self._under_way[exchange] = None
        exchange.start(now_s + limits.queue_timeout_s)
        self.fleet.queue_length = len(self.line)
        return exchange

    def _own_answer(self, message: Message, closes: bool) -> bytes:
        if message.method not in (b"GET", b"HEAD"):
            return answers.error(405, "GET only", closes=closes)
        if message.path == b"/metrics":
            kind = b"text/plain; version=0.0.4; charset=utf-8"
            return answers.answer(200, kind, self.metrics.page(), closes)
        if message.path == b"/ready" and not self.is_ready:
            return answers.error(503, "no replica is available", closes=closes, retry_after_s=1.0)
        return answers.answer(200, b"application/json", b"{}", closes)

    @property
    def is_ready(self) -> bool:
        """Whether a request would find a replica."""
        return not self.is_leaving and any(
            one.is_healthy and not one.breaker.is_open for one in self.targets.values()
        )

    # For exchanges.

    def now_s(self) -> float:
        return monotonic()

    def decide(self, request: Request, without: set[str]) -> Decision:
        view = self.fleet.view(self.now_s())
        if without:
            view = _without(view, without)
        return self.fleet.policy.choose(request, view)

    def has_other(self, tried: set[str]) -> bool:
        return any(
            one.view.is_available and not one.is_peer and one.view.id not in tried
            for one in self.targets.values()
        )

    def fields(self, message: Message, target: Target, request: Request) -> bytes:
        fields = target.fields
        if not target.has_key and not self._keys and (key := message.seen.get(b"authorization")):
            fields += b"Authorization: %b\r\n" % key
        if (parent := message.seen.get(b"traceparent")) is not None:
            fields += b"traceparent: %b\r\n" % parent
        return fields

    def ended(self, exchange: Exchange) -> None:
        self._under_way.pop(exchange, None)
        self.metrics.num_reads += exchange.num_reads
        if self.line:
            self.wake()
        if self._idle is not None and not self._under_way:
            self._idle.set()

    def wake(self) -> None:
        """Look through the line soon; once, however often this is called."""
        if self.line and not self._wakes:
            self._wakes = True
            asyncio.get_running_loop().call_soon(self._wake)

    def _wake(self) -> None:
        self._wakes = False
        self.line.wake()
        self.fleet.queue_length = len(self.line)

    # Time and ends.

    def tick(self) -> None:
        """What time alone brings about; called ten times a second."""
        now_s = self.now_s()
        for target in self.targets.values():
            if target.breaker.is_open:
                target.refresh(now_s)
        self.line.sweep(now_s)
        self.wake()

    def tick_slowly(self) -> None:
        """What may wait a second."""
        now_s = self.now_s()
        for exchange in list(self._under_way):
            if exchange.deadline_s > now_s:
                break
            exchange.expire()
        for client in list(self._clients):
            client.sweep(now_s)
        for target in self.targets.values():
            target.pool.sweep(now_s)
        self.fleet.policy.tick(now_s)

    async def idle(self) -> None:
        """Return when no request is under way."""
        if self._under_way:
            self._idle = asyncio.Event()
            await self._idle.wait()

    def leave(self) -> None:
        """Take no more requests; those under way go on."""
        self.is_leaving = True
        for client in list(self._clients):
            client.leave_if_idle()

    def close(self) -> None:
        """Break off what is under way and close every connection."""
        for prober in self._probers.values():
            prober.stop()
        for client in list(self._clients):
            client.abort()
        for target in self.targets.values():
            target.pool.close()


def _without(view: FleetView, tried: set[str]) -> FleetView:
    """Leaves out what has been tried, where something else is left."""
    left = [one for one in view.replicas if one.id not in tried]
    peers = [one for one in view.peers if one.id not in tried]
    if not any(one.is_available for one in (*left, *peers)):
        return view
    return replace(view, replicas=left, peers=peers)
