"""Balancer that admits client requests, sends each to a replica, and answers probes itself."""

from __future__ import annotations

import asyncio
import random
import resource
from collections.abc import Callable
from pathlib import Path
from time import monotonic

from msgspec import structs

from banaserve.base.access.tenants import OverLimit
from banaserve.base.errors import UserError
from banaserve.base.net.connections import ConnectionTable, Evictable
from banaserve.base.net.loop_watch import LoopWatch
from banaserve.base.net.refusal_log import RefusalLog
from banaserve.base.net.sockets import connections_within
from banaserve.base.net.tls import Certificates
from banaserve.base.types import RequestId
from banaserve.kvstore.sizes import parse_size
from banaserve_route.balancer.auth import (
    MODELS_PATH,
    PEER_FIELD,
    PEER_PATHS,
    PREFIXES_PATH,
    REGIONS_FIELD,
    STATE_PATH,
    Regions,
)
from banaserve_route.balancer.config import BalancerSettings, PolicySettings, ShadowSettings
from banaserve_route.balancer.head_checks import HeadChecks
from banaserve_route.balancer.http import replies
from banaserve_route.balancer.http.client_connection import (
    Client,
    RequestHandler,
    until_flushed,
    write_error,
)
from banaserve_route.balancer.http.request import ClientRequest, RequestRefusedError
from banaserve_route.balancer.metrics import Metrics
from banaserve_route.balancer.page.files import NO_STORE, PAGE_FIELDS, STATUS_PATH, balancer_files
from banaserve_route.balancer.page.status import encode_status
from banaserve_route.balancer.requests.dispatcher import Dispatcher
from banaserve_route.balancer.requests.hedging import Hedger
from banaserve_route.balancer.requests.prompt_blocks import PromptReader
from banaserve_route.balancer.requests.proxy import ProxiedRequest
from banaserve_route.balancer.requests.queue import QueueScheduler, RequestQueue
from banaserve_route.balancer.requests.routing_request import blind_request, read_request
from banaserve_route.balancer.state_file import StateFile
from banaserve_route.balancer.targets.ejection import OutlierEjector
from banaserve_route.balancer.targets.membership import TargetRegistry, shared_prefixes
from banaserve_route.balancer.targets.peers import encode_state
from banaserve_route.balancer.tenants import TenantQuotas, forwarded_identity
from banaserve_route.balancer.tracing import observers
from banaserve_route.policies.fleet import Fleet
from banaserve_route.policies.interface import Need, ReplicaPolicy
from banaserve_route.policies.registry import make
from banaserve_route.policies.shadow import ShadowedPolicy

FIXED = (
    "region",
    "host",
    "port",
    "policy",
    "peers",
    "peer_key",
    "forward_to",
    "traces",
    "decision_log",
    "ssl_certfile",
    "ssl_keyfile",
    "replica_ca",
    "processes",
    "tokenizer",
)
"""Settings that cannot change during the life of a balancer."""
_SMALL_BODY_BYTES = 64 * 1024
Say = Callable[[str], None]
_RESERVED_DESCRIPTORS, _DESCRIPTORS_A_TARGET = 256, 4
"""File descriptors for logs and the resolver, and, per target, for probes."""
TICK_S = 0.1
"""Time between two calls of ``Balancer.tick``."""


class Balancer(RequestHandler):
    """Balancer that takes requests from clients and sends each to one replica.

    Everything runs in the callbacks of one event loop; nothing in this class blocks.

    Attributes:
        fleet: Counters of the targets, and the policy.
        queue: Requests that wait for a target.
        registry: Targets and their probers.
        prefixes: Prefixes shared with peers; None if the policy shares none.
        on_settings: Called with the settings after each change.
        connections: Connections of clients, including those in a TLS handshake.
        certificates: Certificates for serving clients; None for plain HTTP.
        is_leaving: True if no more requests are taken.
    """

    def __init__(self, settings: BalancerSettings, log: Say) -> None:
        """``log`` is called with one line per event.

        Raises:
            UserError: The settings are invalid.
        """
        settings.check()
        self.log = log
        policy = settings.policy
        self.fleet = Fleet(_policy(policy), settings.region, policy.staleness_s)
        self._check_events(settings)
        self._state: StateFile | None = None
        if policy.state_file:
            self._state = StateFile(Path(policy.state_file), policy.name, self.fleet.policy)
            self._state.restore(log)
        self.prefixes = shared_prefixes(self.fleet.policy, settings)
        self.queue, self.metrics = RequestQueue(), Metrics()
        self._schedule_pass = QueueScheduler(self.queue, self.fleet).schedule
        self.registry = TargetRegistry(self.fleet, log, self._schedule_pass, self.prefixes)
        self.targets = self.registry.targets
        self._ejector = OutlierEjector(self.fleet, self.targets, log, self._schedule_pass)
        hedger = Hedger(self._ejector.times)
        self._dispatcher = Dispatcher(self.fleet, self.registry, self.queue, hedger, log)
        self.is_leaving = False
        self.on_settings: Callable[[BalancerSettings], None] = lambda _: None
        self.certificates: Certificates | None = None
        self.buffered_bytes = 0
        self._tenants = TenantQuotas(self._over_limit)
        self.observers = observers(settings, log)
        self._clients: set[Client] = set()
        self._watch = LoopWatch(TICK_S)
        self.connections: ConnectionTable[Evictable] = ConnectionTable(1)
        self._refusal_log = RefusalLog(log)
        self._prompts = PromptReader(settings.tokenizer)
        self._reading: set[asyncio.Task[None]] = set()
        self._under_way: dict[ProxiedRequest, None] = {}
        self._num_requests = 0
        self._idle: asyncio.Event | None = None
        self.metrics.targets = self.targets.values
        self.metrics.caches = self.fleet.caches
        self.metrics.hedges = hedger.counts
        self.metrics.prompts = self._prompts.counts
        if isinstance(self.fleet.policy, ShadowedPolicy):
            self.metrics.shadow = self.fleet.policy
        self.metrics.queue_length = lambda: len(self.queue)
        self.metrics.num_connections = lambda: len(self.connections)
        self.metrics.num_under_way = lambda: len(self._under_way)
        self._take_settings(settings)

    def _check_events(self, settings: BalancerSettings) -> None:
        has_events = any(one.kv_events for one in settings.replicas)
        if has_events and Need.CACHES not in self.fleet.policy.needs:
            raise UserError(
                f"policy {settings.policy.name} does not use kv_events: leave them out, or take "
                f"another policy, such as {PolicySettings().name}"
            )

    def _take_settings(self, settings: BalancerSettings) -> None:
        self.settings, limits = settings, settings.limits
        self.max_body_bytes = parse_size(limits.max_body)
        self.body_timeout_s = limits.body_timeout_s
        self.connections.max_connections = max_connections(settings)
        self.connections.max_per_address = limits.max_connections_per_address
        self._max_buffered_bytes = parse_size(limits.max_buffered)
        self._checks = HeadChecks(settings)
        self._regions = Regions(settings.tenants)
        self._tenants.take_settings(settings)
        has_models = any(one.models for one in settings.replicas)
        is_alone = not (settings.peers or settings.tenants or settings.decision_log)
        self.fleet.policy.hold_safe(settings.policy.hold_safe)
        reads_requests = Need.REQUEST in self.fleet.policy.needs
        hedges = bool(settings.hedge.after)
        self._is_blind = not (reads_requests or has_models or hedges) and is_alone
        self.registry.take_settings(settings)
        self._ejector.take_settings(settings.health)
        self._dispatcher.take_settings(settings)

    def change(self, settings: BalancerSettings) -> None:
        """Apply ``settings`` while serving; requests under way are not affected.

        Raises:
            UserError: The settings are invalid, or differ in one that needs a restart; nothing is
                changed.
        """
        settings.check()
        self._check_events(settings)
        before = structs.replace(
            self.settings,
            policy=structs.replace(self.settings.policy, hold_safe=settings.policy.hold_safe),
        )
        fixed = [key for key in FIXED if getattr(settings, key) != getattr(before, key)]
        if fixed:
            raise UserError(f"{', '.join(fixed)} cannot change while serving: start again")
        self._take_settings(settings)
        self.on_settings(settings)
        self._schedule_pass()

    async def start(self) -> None:
        """Probe every target once, then keep probing."""
        await self.registry.start()

    # Requests of clients: handlers in the order of the events.

    def opened(self, client: Client) -> bool:
        self._clients.add(client)
        evicted = self.connections.add(client, client.peer)
        if evicted is None or evicted is client:
            return evicted is None
        self.dropped("connections", "a connection without a key has made way for a new one")
        evicted.evict()
        return True

    def closed(self, client: Client) -> None:
        self._clients.discard(client)
        self.connections.remove(client, client.peer)

    def check_head(self, client: Client, message: ClientRequest) -> None:
        if self._checks.is_own(message):
            return
        if self._checks.check_key(message):
            self.connections.authenticated(client, client.peer)
        if not self._checks.is_passed(message):
            return
        # Reading a small body costs less than a new connection after a refusal.
        if message.announced_bytes > _SMALL_BODY_BYTES and PEER_FIELD not in message.seen:
            self._check_quota(message)
        if (refusal := self._too_many()) is not None:
            raise refusal

    def _too_many(self) -> RequestRefusedError | None:
        """Return the refusal of one more request; None if it may begin."""
        num_under_way = len(self._under_way)
        if num_under_way < self.settings.limits.max_requests:
            return None
        return RequestRefusedError(429, f"{num_under_way} requests are under way; try again")

    def _check_quota(self, message: ClientRequest) -> None:
        if (over := self._tenants.excess(message)) is not None:
            raise RequestRefusedError(429, str(over), retry_after_s=over.retry_after_s)

    def _over_limit(self, over: OverLimit) -> None:
        self.metrics.over_limit(over.limit)
        self._refusal_log.say(over.limit, f"refused: {over}")

    def hold(self, num_bytes: int) -> None:
        self.buffered_bytes += num_bytes
        if num_bytes > 0 and self.buffered_bytes > self._max_buffered_bytes:
            self.buffered_bytes -= num_bytes
            raise RequestRefusedError(503, "too many bodies are held in memory; try again shortly")

    def refused(self, error: RequestRefusedError) -> None:
        self.metrics.refused(error.status)
        self._refusal_log.say(str(error.status), f"refused ({error.status}): {error}")

    def dropped(self, cause: str, why: str) -> None:
        self.metrics.dropped(cause)
        self._refusal_log.say(cause, why)

    def take(self, client: Client, message: ClientRequest) -> ProxiedRequest | None:
        is_own = message.path in self._checks.own_paths or message.path in PEER_PATHS
        if is_own or (message.path == MODELS_PATH and self._models()):
            client.write(self._answer(message, closes=not client.can_go_on))
            client.done(message)
            return None
        if self.is_leaving:
            client.can_go_on = False
        if (refusal := self._too_many()) is not None:  # others have begun since its head
            self.refused(refusal)
            write_error(client, message, refusal.status, str(refusal), refusal.retry_after_s)
            client.done(message)
            return None
        was_forwarded = PEER_FIELD in message.seen
        tenant = None if was_forwarded else self._tenants.of(message)
        if tenant is not None and (over := self._tenants.begin(tenant)) is not None:
            write_error(client, message, 429, str(over), over.retry_after_s)
            client.done(message)
            return None
        now_s = monotonic()
        self._num_requests += 1
        request_id = RequestId(str(self._num_requests))
        if self._is_blind and REGIONS_FIELD not in message.seen:
            request = blind_request(request_id, message, now_s)
        else:
            allowed = self._regions.allowed(message, was_forwarded)
            request = read_request(request_id, message, now_s, allowed, was_forwarded)
        deadline_s = now_s + self.settings.limits.request_timeout_s
        proxied = ProxiedRequest(
            self._dispatcher, client, message, request, deadline_s, self._ended
        )
        proxied.tenant = tenant
        if was_forwarded:
            proxied.identity = forwarded_identity(message)
        elif tenant is not None:
            proxied.identity = tenant.identity
        for observer in self.observers:
            observer.began(proxied)
        self._under_way[proxied] = None
        if self.fleet.caches.block_sizes or (self.settings.tokenizer and not self._is_blind):
            reading = asyncio.get_running_loop().create_task(self._read_and_start(proxied))
            self._reading.add(reading)
            reading.add_done_callback(self._reading.discard)
        else:
            self._start(proxied)
        return proxied

    def _start(self, proxied: ProxiedRequest) -> None:
        proxied.start()
        self.fleet.queue_length = len(self.queue)

    async def _read_and_start(self, proxied: ProxiedRequest) -> None:
        """Start a request with its tokens counted and the keys of its blocks, made in a thread."""
        caches = self.fleet.caches
        proxied.request = await self._prompts.with_blocks(
            proxied.request, proxied.message, caches.block_sizes, caches.adapters
        )
        if not proxied.is_over:
            self._start(proxied)

    def _ended(self, proxied: ProxiedRequest) -> None:
        now_s = monotonic()
        self._under_way.pop(proxied, None)
        if proxied.tenant is not None:
            proxied.tenant.quota.end()
            proxied.tenant.quota.spend_tokens(proxied.num_tokens, now_s)
        self.metrics.ended(
            proxied.status,
            proxied.request.arrived_s,
            now_s,
            proxied.num_reads,
            proxied.flights,
        )
        for observer in self.observers:
            observer.ended(proxied, now_s)
        if self.queue:
            self._schedule_pass()
        if self._idle is not None and not self._under_way:
            self._idle.set()

    # Answers of the balancer itself.

    def _answer(self, message: ClientRequest, closes: bool) -> bytes:
        """Return the whole answer to ``message``, whose path is one of the balancer's own."""
        if message.method == b"HEAD":
            head, end, _ = self._answer_get(message, closes).partition(b"\r\n\r\n")
            return head + end
        if message.method != b"GET":
            return replies.error(405, "GET only", closes=closes)
        return self._answer_get(message, closes)

    def _answer_get(self, message: ClientRequest, closes: bool) -> bytes:
        if message.path == b"/metrics":
            kind = b"text/plain; version=0.0.4; charset=utf-8"
            return replies.answer(200, kind, self.metrics.page(), closes)
        if message.path == STATUS_PATH:
            region, policy = self.settings.region, self.settings.policy.name
            status = encode_status(region, policy, self.metrics)
            return replies.answer(200, b"application/json", status, closes, NO_STORE)
        if (file := balancer_files().get(message.path)) is not None:
            kind = file.media_type.encode()
            return replies.answer(200, kind, file.body, closes, PAGE_FIELDS)
        if message.path == STATE_PATH:
            state = encode_state(self.registry.state(len(self.queue)))
            return replies.answer(200, b"application/json", state, closes)
        if message.path == PREFIXES_PATH:
            if self.prefixes is None:
                return replies.error(404, "prefixes are not told here", closes=closes)
            kind = b"application/octet-stream"
            return replies.answer(200, kind, self.prefixes.snapshot(), closes)
        if message.path == MODELS_PATH:
            return replies.answer(200, b"application/json", replies.models(self._models()), closes)
        if message.path == b"/ready" and not self.is_ready:
            return replies.error(503, "no replica is available", closes=closes, retry_after_s=1.0)
        return replies.answer(200, b"application/json", b"{}", closes)

    def _models(self) -> list[str]:
        """Return the models of all replicas if these differ; empty if any can list all."""
        each = {one.view.models for one in self.targets.values() if not one.is_peer}
        return sorted(frozenset().union(*each)) if len(each) > 1 and all(each) else []

    @property
    def is_ready(self) -> bool:
        """Return whether a request would find a replica."""
        return not self.is_leaving and self.registry.is_ready

    # Periodic work and shutdown.

    def tick(self) -> None:
        """Do the work that depends on time alone; called ten times a second."""
        now_s = monotonic()
        if self._watch.tick(now_s):
            self.log(f"the balancer's event loop stood still for {self._watch.lag_s:.1f} s")
        for target in self.targets.values():
            if target.breaker.is_open or target.is_starting:
                target.refresh(now_s)
        self.queue.sweep(now_s)
        self._schedule_pass()

    def tick_slowly(self) -> None:
        """Do the periodic work that may be up to a second late."""
        now_s = monotonic()
        for proxied in list(self._under_way):
            if proxied.deadline_s <= now_s:
                proxied.expire()
        if self._watch.may_enforce():
            for client in list(self._clients):
                client.sweep(now_s)
        for target in self.targets.values():
            target.pool.sweep(now_s)
        for one in (self.certificates, self.registry.tls):
            if one is not None:
                one.look()
        self.fleet.policy.tick(now_s)
        if self._state is not None:
            self._state.tick(now_s, self.log)
        self.registry.look_after(now_s)
        self._ejector.tick(now_s)

    async def idle(self) -> None:
        """Return when no request is under way and all answers have left this process."""
        if self._under_way:
            self._idle = asyncio.Event()
            await self._idle.wait()
        await until_flushed(self._clients)

    def leave(self) -> None:
        """Take no more requests; those under way continue."""
        self.is_leaving = True
        for client in list(self._clients):
            client.leave_if_idle()

    def close(self) -> None:
        """Cancel the requests under way and close every connection."""
        for proxied in list(self._under_way):
            proxied.cancel()
        for client in list(self._clients):
            client.abort()
        self.registry.stop()
        for reading in self._reading:
            reading.cancel()
        self._prompts.close()
        for observer in self.observers:
            observer.close()
        if self._state is not None:
            self._state.write(self.log)


def _policy(settings: PolicySettings) -> ReplicaPolicy:
    """Return the policy of the settings, with the shadow policy beside it if there is one."""
    serving = _made(settings)
    return serving if settings.shadow is None else ShadowedPolicy(serving, _made(settings.shadow))


def _made(asked: PolicySettings | ShadowSettings) -> ReplicaPolicy:
    draws = random.Random(asked.seed)
    return make(asked.name, draws, preset=asked.preset or None, **asked.options)


def max_connections(settings: BalancerSettings) -> int:
    """Return the maximum number of client connections: each request needs a second descriptor."""
    num_targets = len(settings.replicas) + len(settings.peers)
    return connections_within(
        resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        settings.limits.max_connections,
        _RESERVED_DESCRIPTORS + _DESCRIPTORS_A_TARGET * num_targets,
        each=2,
    )
