"""The front door: vLLM's API server over our engine client, with our limits and probes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from argparse import Namespace
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from http import HTTPStatus
from time import monotonic
from typing import Any

import msgspec
import uvicorn
from fastapi import FastAPI
from prometheus_client import Counter, Gauge
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from banaserve import __version__
from banaserve.base.config.serve_config import ServeConfig
from banaserve.base.errors import UserError
from banaserve.base.net.loop_watch import LoopWatch, StallWitness
from banaserve.base.net.sockets import keep_alive
from banaserve.base.net.tls import Certificates, ServerTls, TlsListener
from banaserve.base.plugins.discovery import vllm_version
from banaserve.engine.compat.config import ModelConfig
from banaserve.engine.compat.front import server
from banaserve.frontdoor.bodies.bounds import RequestBounds
from banaserve.frontdoor.bodies.grammar_checker import GrammarChecker
from banaserve.frontdoor.bodies.guard import BodyGuard, take_parsed_bodies
from banaserve.frontdoor.edge.edge import Edge
from banaserve.frontdoor.edge.http_protocol import HttpProtocol
from banaserve.frontdoor.edge.limits import EdgeLimits
from banaserve.frontdoor.edge.refusals import answer_engines_died, error_response, note
from banaserve.frontdoor.edge.websockets import WebSocketLimit, WebSocketProtocol
from banaserve.frontdoor.lifecycle.closing import LastAnswers
from banaserve.frontdoor.metrics import MetricsPage
from banaserve.frontdoor.middleware.admission import BodyLimit, ConcurrencyLimit
from banaserve.frontdoor.middleware.api_keys import KeyMiddleware
from banaserve.frontdoor.middleware.request_context import CallTimes, RequestHeaderReader
from banaserve.kvstore.sizes import parse_size
from banaserve.serving.client import DisaggregatedClient
from banaserve.serving.instances.cluster import Cluster
from banaserve.serving.requests.suspects import EnginesDiedError

_MAX_HELD_BYTES = 2**30
"""Maximum size of all bodies together: 512 bodies of the maximum length would exceed the memory
of many machines."""
_HANDSHAKE_S = 1.0
logger = logging.getLogger(__name__)


async def make_app(
    args: Namespace,
    client: DisaggregatedClient,
    cluster: Cluster,
    metrics: MetricsPage,
    config: ServeConfig,
    grammars: GrammarChecker | None,
) -> ASGIApp:
    """Return vLLM's application with all its endpoints, preceded by our own."""
    # KeyMiddleware guards more paths and knows tenants. An empty key turns vLLM's middleware off,
    # which would require the key of VLLM_API_KEY as well; without our keys it remains a guard.
    args.api_key = [""] if config.keys else None
    tasks = await client.get_supported_tasks()
    app = vllm_app(args, tasks, client.model_config)
    await server.bind_engines(app, args, client, tasks)
    server.shorten_access_log(args)
    own = [
        Route("/ready", _ready(cluster)),
        Route("/version", _version),
        Route("/metrics", metrics.answer),
        Route("/scale_elastic_ep", _no_scaling, methods=["POST"]),
    ]
    if server.is_in_dev_mode():
        own.append(Route("/abort_requests", _abort_requests(client), methods=["POST"]))
    # vLLM's own page answers every path that begins with /metrics, and is made at each call.
    others = [one for one in app.router.routes if getattr(one, "path", "") != "/metrics"]
    app.router.routes[:] = [*own, *others]
    # Around the whole application: vLLM's own list of middleware can no longer be changed.
    return CallTimes(guarded(app, config, grammars), client.tracer)


def guarded(app: ASGIApp, config: ServeConfig, grammars: GrammarChecker | None) -> ASGIApp:
    """Return ``app`` behind every middleware that may refuse a request."""
    max_body_bytes = parse_size(config.max_body_size)
    looked_at = BodyGuard(app, RequestBounds.of(config.request_bounds), grammars)
    limited = BodyLimit(looked_at, max_body_bytes, max(_MAX_HELD_BYTES, max_body_bytes))
    counted = ConcurrencyLimit(limited, config.max_concurrent_requests)
    timed = WebSocketLimit(counted)
    told = RequestHeaderReader(timed, config.dilate)
    return KeyMiddleware(told, config.keys, config.metrics_key)


def vllm_app(args: Namespace, tasks: tuple[Any, ...], model_config: ModelConfig | None) -> FastAPI:
    """Return vLLM's application, not yet bound to engines, with a handler of EnginesDiedError."""
    app: FastAPI = server.build_app(args, tasks, model_config)
    server.keep_serving(app, EnginesDiedError, answer_engines_died)
    take_parsed_bodies(app)
    return app


Endpoint = Callable[[Request], Awaitable[Response]]


def _ready(cluster: Cluster) -> Endpoint:
    async def ready(_: Request) -> Response:
        states = {i.id: i.state.value for i in cluster.instances.values()}
        status = 200 if cluster.is_ready else 503
        return JSONResponse({"ready": cluster.is_ready, "instances": states}, status)

    return ready


async def _version(_: Request) -> Response:
    return JSONResponse({"version": __version__, "vllm": vllm_version() or "unknown"})


async def _no_scaling(_: Request) -> Response:
    return error_response(
        HTTPStatus.NOT_IMPLEMENTED, "the number of instances is changed with `banaserve scale`"
    )


def _abort_requests(client: DisaggregatedClient) -> Endpoint:
    """Return the endpoint in place of vLLM's, which aborts all requests of one engine only."""

    async def abort(request: Request) -> Response:
        try:
            asked = msgspec.json.decode(await request.body(), type=_Abort).request_ids
        except msgspec.DecodeError as wrong:
            return error_response(HTTPStatus.BAD_REQUEST, str(wrong))
        known = client.request_ids()
        ids = known.intersection([asked] if isinstance(asked, str) else asked) if asked else known
        await client.abort(ids)
        return JSONResponse({"status": "aborted", "aborted": len(ids)})

    return abort


class _Abort(msgspec.Struct):
    """Body of a call that aborts requests: their ids, or none for all requests."""

    request_ids: list[str] | str | None = None


_TICK_S, _TICKS_A_SWEEP = 0.1, 5
"""Interval at which uvicorn calls ``on_tick``, in seconds, and number of ticks per sweep."""
LAG_S = Gauge(
    "banaserve_front_door_lag_seconds",
    "How much later than due the front door's event loop came to its last tick",
)
STALLED_S = Counter(
    "banaserve_front_door_stalled_seconds",
    "Seconds for which the front door's event loop stood still, in stalls of a second and more",
)


class _Server(uvicorn.Server):
    """Uvicorn server that leaves signals to its caller, sets ``listening``, sweeps connections."""

    def __init__(self, config: uvicorn.Config, edge: Edge, tls: Certificates | None) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()
        self._edge, self._tls = edge, tls
        self._watch = LoopWatch(_TICK_S)
        self._witness = StallWitness()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        self._witness.close()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        for sock in sockets or ():
            keep_alive(sock)
        if self._tls is None:
            await super().startup(sockets)
        else:
            await super().startup([])
            self.servers += [self._tls_listener(sock, self._tls) for sock in sockets or ()]
        self.listening.set()

    def _tls_listener(self, sock: socket.socket, tls: Certificates) -> TlsListener:
        def make() -> asyncio.Protocol:
            made: asyncio.Protocol = self.config.http_protocol_class(
                config=self.config,
                server_state=self.server_state,
                app_state=self.lifespan.state,
            )
            return made

        def failed(cause: str) -> None:
            note(cause, 0, "a connection has ended before its TLS handshake")

        edge = self._edge
        return TlsListener(sock, make, tls, edge.table, edge.limits.handshake_s, failed)

    async def on_tick(self, counter: int) -> bool:
        now_s, where = monotonic(), self._witness.tick()
        if self._watch.tick(now_s):
            STALLED_S.inc(self._watch.lag_s)
            logger.warning(
                "the front door's event loop stood still for %.1f s: %s",
                self._watch.lag_s,
                where or "not seen where",
            )
        LAG_S.set(self._watch.lag_s)
        if counter % _TICKS_A_SWEEP == 0:
            if self._watch.may_enforce():
                self._edge.sweep(now_s)
            if self._tls is not None:
                self._tls.look()
        return bool(await super().on_tick(counter))

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class ApiServer:
    """Front door's HTTP server, which listens until told to stop."""

    def __init__(
        self,
        app: ASGIApp,
        sock: socket.socket,
        args: Namespace,
        limits: EdgeLimits | None = None,
    ) -> None:
        self._answers = LastAnswers(app)
        self._edge = edge = Edge(limits or EdgeLimits())
        self._args = args
        config = uvicorn.Config(
            self._answers,
            log_config=None,
            log_level=args.uvicorn_log_level,
            access_log=not args.disable_uvicorn_access_log,
            timeout_keep_alive=server.keep_alive_s(),
            timeout_graceful_shutdown=2,
            http=partial(HttpProtocol, edge),
            ws=partial(WebSocketProtocol, edge),
        )
        self._config = config
        self._sock = sock
        self._retired_s = 0.0

    async def open(self) -> asyncio.Task[None]:
        """Start listening; the returned task ends when the server has closed.

        Raises:
            UserError: The server cannot listen.
        """
        try:
            tls = tls_of(self._args)
            certificates = Certificates(tls, logger.warning) if tls else None
        except UserError as error:
            raise UserError(f"the front door cannot open: {error}") from None
        self._server = _Server(self._config, self._edge, certificates)
        task = asyncio.create_task(self._server.serve(sockets=[self._sock]))
        listening = asyncio.create_task(self._server.listening.wait())
        await asyncio.wait({task, listening}, return_when=asyncio.FIRST_COMPLETED)
        listening.cancel()
        if task.done():
            why = task.exception() or "see front.log in the run's folder"
            raise UserError(f"the front door cannot open: {why}")
        return task

    def close(self) -> None:
        """Accept no more requests; requests under way have two seconds to end."""
        self._server.should_exit = True

    def retire(self) -> None:
        """Accept no more connections: another server accepts them, on the same socket.

        Requests on open connections are served, and each answer closes its connection.
        """
        self._answers.is_retired = True
        self._retired_s = asyncio.get_running_loop().time()
        for one in self._server.servers:
            one.close()

    def num_connections(self) -> int:
        """Return the number of open connections; idle ones end after vLLM's keep-alive time.

        For a second after ``retire`` it is at least 1: a connection in its TLS handshake is not in
        the table.
        """
        is_settling = asyncio.get_running_loop().time() < self._retired_s + _HANDSHAKE_S
        return len(self._edge.table) + is_settling


def tls_of(args: Namespace) -> ServerTls | None:
    """Return the TLS settings in vLLM's parsed options; None without TLS."""
    if not args.ssl_certfile:
        return None
    return ServerTls(
        args.ssl_certfile,
        args.ssl_keyfile or "",
        args.ssl_ca_certs or "",
        args.ssl_cert_reqs,
        args.ssl_ciphers or "",
    )
