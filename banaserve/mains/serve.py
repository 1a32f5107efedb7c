"""Life of ``banaserve serve``, from parsed options to the end of its last process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import resource
import secrets
import socket
import time
from argparse import Namespace
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.types import ASGIApp

from banaserve.base.clock import Clock, WallClock
from banaserve.base.config.orchestrator_config import SLO_AWARE
from banaserve.base.config.serve_config import ServeConfig
from banaserve.base.errors import BanaServeError, InstanceDeadError, UserError
from banaserve.base.net.addresses import written
from banaserve.base.platform.run_dir import AdminAccess, RunDir, remove_admin, write_admin
from banaserve.base.plugins.policy_options import option_names
from banaserve.base.tasks import end_tasks
from banaserve.base.types import InstanceId, Role
from banaserve.contracts.control_api import ControllerState
from banaserve.contracts.rpc.engine_api import WorkerApi
from banaserve.contracts.rpc.typed_rpc import call
from banaserve.engine.compat.config import VllmConfig, own_budget
from banaserve.engine.compat.engine import EngineDeadError
from banaserve.engine.compat.front.server import get_span_exporter
from banaserve.engine.compat.requests import GracefulHTTPError
from banaserve.frontdoor.admin.app import AdminMiddleware, Traces
from banaserve.frontdoor.admin.control import Control
from banaserve.frontdoor.admin.live import LivePage
from banaserve.frontdoor.app import ApiServer, make_app
from banaserve.frontdoor.bodies.grammar_checker import GrammarChecker
from banaserve.frontdoor.edge.edge import RootPath
from banaserve.frontdoor.edge.limits import edge_limits
from banaserve.frontdoor.lifecycle.closing import ClosingMiddleware, StopSignals, until_none
from banaserve.frontdoor.lifecycle.listening_socket import FrontSocket, Offer, SocketOffer
from banaserve.frontdoor.log_rotation import rotating
from banaserve.frontdoor.metrics import MetricsPage
from banaserve.frontdoor.page.page import PageMiddleware
from banaserve.frontdoor.page.records import PageInfo
from banaserve.kvstore.client.admin import fetch_stats
from banaserve.kvstore.daemon.options import StoreOptions
from banaserve.kvstore.daemon.supervised import SupervisedStore
from banaserve.kvstore.fingerprint import check_alike
from banaserve.kvstore.sizes import parse_size
from banaserve.kvstore.stats import StoreStats
from banaserve.orchestrator.control.autoscaling import AutoscaleOptions
from banaserve.orchestrator.control.move_policies import registry as migration_policies
from banaserve.orchestrator.control.rebalancing import RebalanceOptions, Stream
from banaserve.orchestrator.control.routing import registry
from banaserve.orchestrator.control.routing.legs import LegOptions
from banaserve.orchestrator.control.turn import ControlLimits, Mode
from banaserve.orchestrator.planner.forecast_profile import forecast_profile
from banaserve.orchestrator.planner.loop.decision_format import rebalancing_of
from banaserve.orchestrator.planner.loop.decision_log import DecisionLog
from banaserve.orchestrator.planner.loop.loop import Controller, ControllerOptions
from banaserve.orchestrator.planner.loop.time_scaling import dilated, stretched
from banaserve.serving.client import DisaggregatedClient
from banaserve.serving.instances.cluster import Cluster
from banaserve.serving.instances.factory import InstanceFactory
from banaserve.serving.instances.instance import Instance
from banaserve.serving.instances.lasting_calls import LastingCalls
from banaserve.serving.instances.probe import ClusterTimeouts
from banaserve.serving.launch.engine_settings import Budgets, EngineSettings, RoleEngine
from banaserve.serving.launch.launcher import Launcher
from banaserve.serving.monitoring import metrics
from banaserve.serving.monitoring.engine_series import EngineSeries, LabelledRegistry
from banaserve.serving.moves.coordinator import Coordinator
from banaserve.serving.moves.guest_monitor import live_migration
from banaserve.serving.operations.admission import Admission
from banaserve.serving.operations.autoscaler import Autoscaler
from banaserve.serving.operations.executor import MoveExecutor
from banaserve.serving.operations.node_changes import NodeChanges
from banaserve.serving.operations.roles import Drains, Roles
from banaserve.serving.operations.rolling_restart import Make, RollingRestarts
from banaserve.serving.operations.scaler import Scaler
from banaserve.serving.requests.prefix_lookup import PrefixLookup
from banaserve.serving.requests.rebalancer import Rebalancer
from banaserve.serving.requests.router import Router
from banaserve.serving.tracing.trace_collection import TraceCollector

Say = Callable[[str], None]
T = TypeVar("T")

if TYPE_CHECKING:  # OpenTelemetry is imported only if it is used
    from banaserve.serving.tracing.otlp import OtlpTracer

logger = logging.getLogger(__name__)
_ANSWER_S, _NUM_ASKED = 30.0, 10
_FIRST_PAUSE_S, _MOST_PAUSE_S = 0.5, 10.0
"""First and longest pause before a retry, in seconds: about a minute in all, in which an engine
is restarted."""
_MIN_STEP_TIMEOUT_S = 60.0
_HOP_BYTES_PER_S = 2e9


@dataclass(frozen=True)
class Parts:
    """Parts of a server that are prepared before the event loop begins.

    Attributes:
        engine_config: vLLM's configuration of every instance.
        args: vLLM's parsed options, for its API server.
        front: Source of the socket that the front door listens on.
        instance_bytes: Memory of one instance on a CPU; 0 on GPUs, whose memory is not shared by
            instances.
        time: Description of modelled time for the user; empty in real time.
        by_role: Engines for the roles that need different ones.
    """

    config: ServeConfig
    engine_config: VllmConfig
    args: Namespace
    launcher: Launcher
    front: FrontSocket
    run: RunDir
    make_settings: Make
    instance_bytes: int
    time: str
    by_role: Mapping[Role, RoleEngine]

    @property
    def model_name(self) -> str:
        """Name of the model in the API."""
        return str(self.engine_config.model_config.served_model_name)


async def serve(parts: Parts, say: Say, on_open: Callable[[str], None]) -> None:
    """Start store, instances and front door; return when all have ended.

    They end at a signal, or when another server takes the front door over.

    Args:
        on_open: Called when requests are answered, with a one-time code for the page, empty
            without a page.

    Raises:
        UserError: A part could not be started; nothing is left running.
        InstanceDeadError: No instance can be restarted; nothing is left running.
    """
    signals = StopSignals()
    async with AsyncExitStack() as stack:
        max_log_bytes = parse_size(parts.config.log_max_size) if parts.config.log_max_size else 0
        await stack.enter_async_context(rotating(parts.run.logs, max_log_bytes))
        stack.push_async_callback(parts.launcher.leave)
        if not await _unless(signals.stop, parts.launcher.open(say)):
            return
        await _start_store(stack, parts, say)
        series = EngineSeries(parts.engine_config)
        factory = InstanceFactory(
            series, parts.launcher, parts.run, WallClock(), parts.instance_bytes
        )
        cluster = _cluster(parts, factory)
        router = _router(parts.config, cluster)
        stack.callback(router.lookups.close)
        stack.push_async_callback(cluster.stop)
        if not await _unless(signals.stop, _start(cluster, say)):
            return
        coordinator = await stack.enter_async_context(
            live_migration(
                cluster,
                parts.launcher,
                parts.engine_config,
                parts.run,
                parts.config.migration_guest_share,
                parts.config.migration_transport,
            )
        )
        client = await _connect(parts, router, factory.lasting, coordinator)
        stack.callback(client.shutdown)
        control = _start_control(stack, parts, router, factory, coordinator, client)
        collector = TraceCollector(cluster.instances, WallClock(), lambda: coordinator.committed)
        client.tracer = _tracer(stack, parts, collector)
        grammars = GrammarChecker(client.grammar_vocabulary)
        stack.callback(grammars.close)
        closing = ClosingMiddleware(await _app(parts, client, cluster, factory, grammars))
        key = parts.config.admin_key or secrets.token_urlsafe(32)
        page = _page(parts, control, coordinator, client)
        traces = Traces(client.requests, collector)
        app: ASGIApp = AdminMiddleware(closing, coordinator, key, control, traces, page)
        if page is not None:
            stack.callback(page.viewers.close)
            app = PageMiddleware(app, PageInfo("live", parts.model_name, parts.time))
        sock = await parts.front.obtain(say)
        num_descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        limits, problem = edge_limits(parts.config, num_descriptors)
        if problem:
            say(problem)
        server = ApiServer(RootPath(app, parts.args.root_path), sock, parts.args, limits)
        closed = await server.open()
        await parts.front.serves(say)
        offer = await _offer(stack, parts, sock, server)
        _write_admin(parts, sock, key)
        on_open(page.access.new_code() if page is not None else "")
        over = (signals.stop, offer.retired, cluster.supervisor.failed)
        await asyncio.wait(
            {closed, *(asyncio.create_task(event.wait()) for event in over)},
            return_when=asyncio.FIRST_COMPLETED,
        )
        if page is not None:
            page.viewers.close()  # browsers reconnect, to the next server
        await _end_requests(
            parts.config.drain_timeout_s, signals, offer, closing, server, cluster, say
        )
        say("stopping")
        server.close()
        cluster.refuse()
        with contextlib.suppress(asyncio.CancelledError):
            await closed
        if cluster.supervisor.failed.is_set() and not signals.stop.is_set():
            [first, *_] = cluster.instances.values()
            words = cluster.supervisor.last_failure or first.last_words()
            raise InstanceDeadError(
                f"no instance can be started again, and all have been given up: {words}"
            )


async def _end_requests(
    drain_s: float,
    signals: StopSignals,
    offer: SocketOffer,
    closing: ClosingMiddleware,
    server: ApiServer,
    cluster: Cluster,
    say: Say,
) -> None:
    """Wait for requests under way, up to ``drain_s``; for connections too after a take-over."""
    if offer.retired.is_set():
        say(
            f"process {offer.taker} has taken the front door over: {closing.num_requests} "
            f"requests are under way, waiting up to {drain_s:g} s for them and for open "
            "connections"
        )
        await until_none(server.num_connections, drain_s, signals.now, cluster.serving)
        return
    if closing.num_requests and drain_s and signals.stop.is_set() and not signals.now.is_set():
        say(
            f"{closing.num_requests} requests are under way: waiting up to {drain_s:g} s for "
            "them; a second signal ends it now"
        )
    await closing.close(drain_s, signals.now, cluster.serving)


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Run ``work`` until its end or a signal; return False if the signal came first."""
    task = asyncio.create_task(work)
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not task.done():
        await end_tasks(task)
        return False
    task.result()
    return True


async def _start_store(stack: AsyncExitStack, parts: Parts, say: Say) -> None:
    """Start the store, if the server has one; ``stack`` ends it."""
    if not parts.config.kv_store:
        return
    options = parts.launcher.local_store(StoreOptions.of(parts.config))
    say(f"starting the KV cache store ({options.size})")
    log = parts.run.logs / "kvstore.log"
    store = SupervisedStore(parts.run.store_socket, options, log, metrics.STORE_RESTARTS.inc)
    stack.push_async_callback(store.stop)
    await store.start()
    for problem in await store.problems():
        if parts.config.take_over is not None:
            raise UserError(f"--take-over: no server is replaced by one {problem}")
        say(problem)
    parts.launcher.follow_peers(store.set_peers)


def _tracer(stack: AsyncExitStack, parts: Parts, collector: TraceCollector) -> OtlpTracer | None:
    """Return the tracer; None without ``--otlp-traces-endpoint``, and OpenTelemetry is not used."""
    endpoint = parts.args.otlp_traces_endpoint
    if endpoint is None:
        return None
    from banaserve.serving.tracing.otlp import OtlpTracer

    try:
        exporter = get_span_exporter(endpoint)
    except ValueError as wrong:
        raise UserError(f"--otlp-traces-endpoint {endpoint}: {wrong}") from wrong
    tracer = OtlpTracer(exporter, collector, parts.model_name)
    tracer.start()
    stack.push_async_callback(tracer.close)
    return tracer


def _cluster(parts: Parts, factory: InstanceFactory) -> Cluster:
    config, budgets = parts.config, Budgets.of(parts.config, parts.engine_config)
    settings = EngineSettings(parts.engine_config, budgets, by_role=parts.by_role)
    instances = [factory.make(name, role, settings) for name, role in config.instances()]
    timeouts = ClusterTimeouts(
        config.start_timeout_s,
        # With --pace an engine is idle while modelled time passes.
        max(1.0, config.dilate) * config.engine_stall_s,
        max(1.0, config.dilate) * config.engine_spin_s,
    )
    return Cluster(instances, WallClock(), timeouts)


def _router(config: ServeConfig, cluster: Cluster) -> Router:
    legs = LegOptions(skip_prefill_below_tokens=config.skip_prefill_below_tokens)
    options = registry.POLICIES.get(config.routing_policy).Options
    section = stretched(options, config.routing_section, config.dilate)
    policy = registry.make_named(config.routing_policy, legs=legs, **section)
    return Router(cluster, policy, WallClock(), config.restart_grace_s, config.gather_decode_s)


async def _start(cluster: Cluster, say: Say) -> None:
    ids = ", ".join(cluster.instances)
    say(f"starting instances {ids}")

    def on_ready(instance: Instance) -> None:
        say(f"instance {instance.id} ({instance.role.value}) is ready")

    failed: list[BaseException] = []
    try:
        await cluster.start(on_ready)
    except* BanaServeError as failures:
        failed += failures.exceptions
    if failed:  # raised above, Python 3.11.2 puts it into a group
        raise UserError(str(failed[0]))


async def _connect(
    parts: Parts, router: Router, lasting: LastingCalls, coordinator: Coordinator
) -> DisaggregatedClient:
    client = DisaggregatedClient(
        parts.engine_config,
        router,
        parts.config.request_timeout_s,
        lookup_above_tokens=parts.config.skip_prefill_below_tokens,
        lasting=lasting,
        end_moves=coordinator.end_moves,
        has_store_peers=bool(parts.config.kv_store_peers),
    )
    await _answered(client.adopt_engine_facts)
    cache = client.vllm_config.cache_config
    if router.policy.reads_resident_tokens and cache.enable_prefix_caching:
        router.follow_residency(cache.block_size)
    if parts.config.kv_store:  # for colocated instances too: their roles may change
        asked = call(WorkerApi.banaserve_fingerprint)
        answers = await _answered(lambda: client.ask("collective_rpc", asked.name))
        every = [asked.read(one) for answer in answers for one in answer]
        found = [one for one in every if one is not None]
        assert len(found) == len(every), "with a store every worker has a connector"
        check_alike(found)
        lookup = PrefixLookup(parts.engine_config, found[0], str(parts.run.store_socket))
        weights = next(iter(router.cluster.instances.values())).weights
        router.lookups.by_weights[weights] = lookup
    return client


async def _answered(
    ask: Callable[[], Awaitable[T]],
    clock: Clock | None = None,
    draw: Callable[[], float] = random.random,
) -> T:
    """Return the answer of every serving instance; ask again if an instance has ended meanwhile.

    An engine that dies during a call may never answer it, so a call has a timeout. A call to a
    dead engine fails at once, so each retry follows a pause: doubled each time up to a maximum, of
    which a random part of up to a half is left out: ``draw`` returns a number in [0, 1).
    """
    clock = clock or WallClock()
    for number in range(_NUM_ASKED):
        if number:
            pause_s = min(_MOST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (number - 1))
            logger.warning("an instance has not answered while the server starts: asked again")
            await clock.sleep(pause_s * (1 - draw() / 2))
        try:
            async with asyncio.timeout(_ANSWER_S):
                return await ask()
        except (TimeoutError, EngineDeadError, GracefulHTTPError):
            pass
    raise UserError("the instances do not answer: see their logs")


async def _app(
    parts: Parts,
    client: DisaggregatedClient,
    cluster: Cluster,
    factory: InstanceFactory,
    grammars: GrammarChecker,
) -> ASGIApp:
    def registries() -> Sequence[LabelledRegistry]:
        for instance in cluster.instances.values():
            instance.board.count()
        return factory.series.registries

    return await make_app(
        parts.args,
        client,
        cluster,
        MetricsPage(registries, _store_stats(parts)),
        parts.config,
        grammars,
    )


def _store_stats(parts: Parts) -> Callable[[], StoreStats] | None:
    return partial(fetch_stats, parts.run.store_socket) if parts.config.kv_store else None


def _page(
    parts: Parts, control: Control, coordinator: Coordinator, client: DisaggregatedClient
) -> LivePage | None:
    """Return the page's data source; None with ``--no-ui``."""
    if not parts.config.ui:
        return None
    return LivePage(control, coordinator, client.requests, WallClock(), _store_stats(parts))


def _start_control(
    stack: AsyncExitStack,
    parts: Parts,
    router: Router,
    factory: InstanceFactory,
    coordinator: Coordinator,
    client: DisaggregatedClient,
) -> Control:
    """Start the control of instances; ``stack`` ends the operations that are under way then."""
    clock, config, chosen = WallClock(), parts.config, parts.config.orchestrator
    requests, cluster = client.requests, router.cluster
    roles = Roles(cluster.instances, clock)
    stack.push_async_callback(roles.stop)
    if chosen.is_elastic:
        requests.observe()
    executor = MoveExecutor(
        cluster,
        coordinator,
        roles,
        clock,
        config.migration_kv_growth,
        requests.observed if chosen.is_elastic else None,
    )
    options = ControllerOptions(
        mode=Mode(chosen.mode),
        policy=chosen.policy,
        section={**_section(config, parts.engine_config), **dict(chosen.options)},
        interval_s=chosen.interval_s,
        limits=ControlLimits(concurrent=chosen.concurrent, per_minute=chosen.per_minute),
        time=parts.time,
    )
    log = DecisionLog(chosen.decision_log)
    controller = Controller(executor, dilated(options, config.dilate), log, clock, time.time)
    controller.start()
    stack.push_async_callback(controller.stop)
    drains = Drains(cluster.instances, roles)
    scaler = Scaler(
        cluster,
        coordinator,
        roles,
        drains,
        factory,
        clock,
        config.start_timeout_s,
        is_restarting=lambda: restarts.is_under_way,
        roles_follow_load=chosen.is_elastic and options.mode is Mode.ON,
        has_store=config.kv_store,
    )
    stack.push_async_callback(scaler.stop)
    if config.scale_max:
        usual = AutoscaleOptions(config.scale_min, config.scale_max)
        grow_s, shrink_s = usual.grow_after_s * config.dilate, usual.shrink_after_s * config.dilate
        autoscaler = Autoscaler(
            scaler,
            executor.view,
            lambda: controller.status().state is ControllerState.RUNNING,
            replace(usual, grow_after_s=grow_s, shrink_after_s=shrink_s),
            clock,
            chosen.interval_s,
            by_role=not chosen.is_elastic,
        )
        autoscaler.start()
        stack.push_async_callback(autoscaler.stop)
    store_socket = str(parts.run.store_socket) if config.kv_store else ""
    admission = Admission(router.lookups, client, store_socket)
    restarts = RollingRestarts(
        cluster,
        coordinator,
        next(iter(cluster.instances.values())).settings,
        parts.make_settings,
        admission.check,
        admission.forget,
        config.request_timeout_s,
        clock,
        lambda: scaler.is_under_way,
    )
    stack.push_async_callback(restarts.stop)
    nodes = NodeChanges(parts.launcher, scaler, cluster, clock)
    nodes.start()
    stack.push_async_callback(nodes.stop)

    def note_rebalancing(moves: Mapping[InstanceId, Sequence[Stream]]) -> None:
        log.add(rebalancing_of(executor.view(), moves, time.time(), options.time))

    if config.rebalances and config.kv_store:  # moved streams fetch their KV in the store
        given = {"tpot_s": float(config.routing_section.get("tpot_s", 0.0))}
        rebalancing = RebalanceOptions(**stretched(RebalanceOptions, given, config.dilate))
        rebalancer = Rebalancer(router, rebalancing, clock, note_rebalancing)
        rebalancer.start()
        stack.push_async_callback(rebalancer.stop)
    return Control(controller, executor, roles, drains, scaler, router.policy, restarts, nodes)


def _section(config: ServeConfig, engine_config: VllmConfig) -> dict[str, Any]:
    """Return the policy's options for real engines.

    Timeouts allow for a guest that has to be forked and to load weights. Messages between steps
    need neither: they are copies in memory.
    """
    chosen = config.orchestrator
    if chosen.is_elastic:
        num_tokens, num_requests = own_budget(engine_config)
        predicts = config.routing_policy == SLO_AWARE
        return {
            "profile": forecast_profile(config),
            "dilation": config.dilate,
            "ttft_s": chosen.slo_ttft_s,
            "tpot_s": chosen.slo_tpot_s,
            # The server's own routing shapes the arrangement only if it predicts times.
            "routing": config.routing_policy if predicts else ServeConfig().routing_policy,
            "min_step_tokens": min(num_requests, num_tokens),
            "max_step_tokens": num_tokens,
        }
    given = {"min_timeout_s": _MIN_STEP_TIMEOUT_S, "hop_bytes_per_s": _HOP_BYTES_PER_S}
    known = option_names(migration_policies.POLICIES.get(chosen.policy).Options)
    return {name: value for name, value in given.items() if name in known}


async def _offer(
    stack: AsyncExitStack, parts: Parts, sock: socket.socket, server: ApiServer
) -> SocketOffer:
    """Let another server take ``sock`` over; ``server`` then accepts no more connections."""
    config = parts.config
    said = Offer(os.getpid(), config.host, config.port, scheme_of(parts.args))
    offer = SocketOffer(parts.run.offer, sock, said)

    async def retire() -> None:
        await offer.taken.wait()
        remove_admin(parts.run.logs)
        server.retire()
        offer.retired.set()

    retiring = asyncio.create_task(retire())
    stack.callback(retiring.cancel)
    await stack.enter_async_context(offer.open())
    return offer


def scheme_of(args: Namespace) -> str:
    """Return the scheme of the front door's URLs, given vLLM's parsed options."""
    return "https" if args.ssl_certfile else "http"


def _write_admin(parts: Parts, sock: socket.socket, key: str) -> None:
    """Write the admin API's URL and key where this user's commands find them."""
    url = f"{scheme_of(parts.args)}://{written(*sock.getsockname()[:2])}"
    own_key = "" if parts.config.admin_key else key
    certificate = parts.args.ssl_certfile
    access = AdminAccess(url, own_key, str(Path(certificate).absolute()) if certificate else "")
    write_admin(parts.run.logs, access)
