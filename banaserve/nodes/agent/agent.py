"""Agent of a node: runs engines, guests and a store for one server that knows the cluster's key."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import platform
import ssl
import time
from collections.abc import Callable

import psutil

from banaserve.base.errors import BanaServeError, ProtocolError, UserError
from banaserve.base.net.addresses import written
from banaserve.base.platform.linux import available_memory_bytes, visible_gpus
from banaserve.base.platform.run_dir import RunDir
from banaserve.base.tasks import end_tasks
from banaserve.nodes import messages
from banaserve.nodes.agent.session import NodeSession
from banaserve.nodes.credentials import ClusterCredentials
from banaserve.nodes.link import CONNECT_S, NodeLink, NodeLostError, accepted
from banaserve.nodes.measuring import echo, measure_link
from banaserve.nodes.messages import own_version
from banaserve.nodes.model_check import check_model

logger = logging.getLogger(__name__)

FENCE_S = 5.0
"""Silence after which a server has given up this node, in seconds: its processes are ended."""
_NEXT_S = 15.0
"""Maximum time a new server waits for the previous server's processes to end, in seconds."""
_MAX_CONNECTIONS = 512


class NodeAgent:
    """Agent that listens for a server and runs its session.

    Args:
        credentials: Credentials of the cluster.
        run: Folders of this agent's run.
        say: Called with each line for the node's user.
    """

    def __init__(
        self, credentials: ClusterCredentials, run: RunDir, say: Callable[[str], None]
    ) -> None:
        self._credentials = credentials
        self._run = run
        self._say = say
        self._session: NodeSession | None = None
        self._ended = asyncio.Event()
        self._ended.set()
        self._ending: asyncio.Task[None] | None = None  # of the newest session
        self._host = ""
        self._num_connections = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(
        self, host: str, port: int, stop: asyncio.Event, on_open: Callable[[int], None]
    ) -> None:
        """Listen at ``host:port`` until ``stop`` is set; return when every process has ended.

        Args:
            port: Port to listen on; 0 takes a free one.
            on_open: Called with the port.

        Raises:
            UserError: It is not possible to listen at this address.
        """
        self._host = host
        try:
            server = await asyncio.start_server(
                self._take,
                host,
                port,
                ssl=self._credentials.server,
                ssl_handshake_timeout=CONNECT_S,
                limit=messages.MAX_MESSAGE_BYTES,
            )
        except OSError as error:
            raise UserError(f"--listen {host}:{port}: {error.strerror or error}") from error
        asyncio.get_running_loop().set_exception_handler(_log_strangers)
        port = server.sockets[0].getsockname()[1]
        self._say(f"this node takes a server's engines at {written(host, port)}")
        on_open(port)
        try:
            await stop.wait()
        finally:
            server.close()
            await end_tasks(*self._tasks)
            if self._ending is not None:  # goes on although the task that began it is cancelled
                await self._ending

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._num_connections >= _MAX_CONNECTIONS:
            writer.transport.abort()
            return
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._num_connections += 1
        link = accepted(reader, writer, FENCE_S)
        try:
            await self._serve(link)
        except (NodeLostError, ProtocolError) as error:
            logger.info("%s", error)
        except (BanaServeError, OSError) as error:
            logger.warning("%s: %s", link.peer, error)
            with contextlib.suppress(NodeLostError):
                await link.send(messages.NodeRefused(str(error)))
        except Exception:
            logger.exception("%s", link.peer)
        finally:
            self._tasks.discard(task)
            self._num_connections -= 1
            await link.close()

    async def _serve(self, link: NodeLink) -> None:
        async with asyncio.timeout(CONNECT_S):
            said = await link.receive()
        link.start_beats()
        match said:
            case messages.OpenSession():
                await self._serve_session(link, said)
            case messages.JoinSession():
                session = self._session
                if session is None or session.incarnation != said.incarnation:
                    raise UserError("what is to be joined has ended: the node has begun anew")
                await session.run_process(link, said)
            case messages.Inspect():
                server = self._session.server if self._session is not None else ""
                await link.send(await asyncio.to_thread(_inspected, said, server))
            case messages.MeasureLink(host, port):
                await link.send(await measure_link(host, port, self._credentials))
            case messages.EchoLink():
                await echo(link, self._host)
            case _:
                raise ProtocolError(f"{link.peer} begins with a {type(said).__name__}")

    async def _serve_session(self, link: NodeLink, asked: messages.OpenSession) -> None:
        if asked.protocol != messages.PROTOCOL or asked.version != own_version():
            raise UserError(
                f"the server has {asked.version}, this node {own_version()}: "
                "install the same on both"
            )
        if self._session is not None and self._session.server != asked.server:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_NEXT_S):
                    await self._ended.wait()
        elif self._session is not None:
            await self._ended.wait()  # the same server has lost its previous connection
        if self._session is not None:
            raise UserError(f"the node is used by another server, {self._session.server}")
        session = self._session = NodeSession(link, asked.server, self._host, self._run)
        self._ended.clear()
        self._say(f"server {asked.server} has taken this node")
        try:
            await session.run()
        finally:
            self._ending = asyncio.create_task(self._end(session))
            await asyncio.shield(self._ending)

    async def _end(self, session: NodeSession) -> None:
        await session.close()
        self._session = None
        self._ended.set()
        self._say(f"server {session.server} has left: all that ran for it has ended")


def _inspected(asked: messages.Inspect, server: str) -> messages.Inspected:
    """Return the resources of this machine, and whether it has the model; blocking."""
    problem = ""
    try:
        check_model(asked.vllm_argv, asked.model_digest)
    except UserError as error:
        problem = str(error)
    return messages.Inspected(
        version=own_version(),
        python=platform.python_version(),
        gpus=tuple(visible_gpus()),
        memory_bytes=available_memory_bytes(),
        num_processors=len(psutil.Process().cpu_affinity()),
        time_s=time.time(),
        model_problem=problem,
        server=server,
    )


def _log_strangers(loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
    """Log a failed handshake at debug level only: otherwise a port scan would fill the log."""
    error = context.get("exception")
    if isinstance(error, ssl.SSLError | ConnectionError):
        logger.debug("%s", error)
        return
    loop.default_exception_handler(context)
