"""Server's side of a session with a node: opened, prepared, kept, and opened again when lost."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from banaserve.base.errors import ProtocolError
from banaserve.base.net.loop_watch import wait_first
from banaserve.base.tasks import end_tasks
from banaserve.nodes import messages
from banaserve.nodes.credentials import ClusterCredentials
from banaserve.nodes.link import PATIENT_S, SILENT_S, NodeLink, NodeLostError, connect
from banaserve.nodes.messages import own_version
from banaserve.nodes.places import AgentPlace

T = TypeVar("T", bound=messages.NodeMessage)
logger = logging.getLogger(__name__)
RETRY_S = 1.0
_ANSWER_S = 20.0
"""Maximum time for an answer, in seconds: a node may still be ending the previous session."""
_PREPARE_S = 150.0
"""Maximum time to prepare a node, in seconds: an engine parent imports slowly on a busy machine."""


class NodeClient:
    """Session with the agent at ``place``.

    Args:
        server: Name of this server for the node.
        on_store_restart: Called each time the node's store had to be started again.

    Attributes:
        opened: The node's answer with its resources; None while the node is away.
        is_ready: True if engines can be started on the node.
        problem: Reason why the node is away.
        place: Place where the node's agent is looked for.
    """

    def __init__(
        self,
        place: AgentPlace,
        credentials: ClusterCredentials,
        server: str,
        on_store_restart: Callable[[], None],
    ) -> None:
        self.place = place
        self.opened: messages.SessionOpened | None = None
        self.is_ready = False
        self.problem = "it has not been reached yet"
        self._credentials = credentials
        self._server = server
        self._on_store_restart = on_store_restart
        self._link: NodeLink | None = None
        self._reading: asyncio.Task[None] | None = None
        # One for each question, in their order: the answer to an abandoned one is dropped.
        self._answers: deque[asyncio.Future[messages.NodeMessage]] = deque()
        self._lost = asyncio.Event()
        self._asking = asyncio.Lock()

    @property
    def host(self) -> str:
        """Return the host address of the node."""
        return self.place.host

    @property
    def name(self) -> str:
        """Return the display name of the node, ``HOST:PORT``."""
        return self.place.name

    async def open(self) -> messages.SessionOpened:
        """Take the node.

        Raises:
            NodeLostError: The node cannot be reached, or refuses.
        """
        place = self.place
        self._link = await connect(place.host, place.port, self._credentials, PATIENT_S)
        self._lost = asyncio.Event()
        self._answers = deque()
        self._reading = asyncio.create_task(self._read(self._link))
        try:
            asked = messages.OpenSession(messages.PROTOCOL, own_version(), self._server)
            self.opened = await self._ask(asked, messages.SessionOpened, _ANSWER_S)
        except NodeLostError as error:
            await self._leave(str(error))
            raise
        return self.opened

    async def free_port(self) -> int:
        """Return a port of the node on which nothing listens at present.

        Raises:
            NodeLostError: The node is away.
        """
        return (await self._ask(messages.FreePort(), messages.PortFound, _ANSWER_S)).port

    async def prepare(self, order: messages.PrepareNode) -> None:
        """Let the node start its store and the parent that engines are forked from.

        Raises:
            NodeLostError: The node cannot start them, or is away.
        """
        await self._ask(order, messages.Done, _PREPARE_S)
        self.is_ready = True
        if self._link is not None:
            self._link.silent_s = SILENT_S

    async def set_store_peers(self, peers: Sequence[str]) -> None:
        """Let the node's store fetch blocks from these peers, and no others.

        Raises:
            NodeLostError: The node is away.
        """
        await self._ask(messages.SetStorePeers(tuple(peers)), messages.Done, _ANSWER_S)

    async def wait_lost(self) -> None:
        """Return when the node is away."""
        await self._lost.wait()

    async def close(self) -> None:
        """Give the node back: all processes of this server there end."""
        await self._leave("this server ends")

    async def _leave(self, problem: str) -> None:
        link, self._link = self._link, None
        self.opened, self.problem, self.is_ready = None, problem, False
        if self._reading is not None and self._reading is not asyncio.current_task():
            await end_tasks(self._reading)
        if link is not None:
            await link.close()
        self._lost.set()

    async def _ask(self, question: messages.NodeMessage, kind: type[T], timeout_s: float) -> T:
        async with self._asking:
            link = self._link
            if link is None:
                raise NodeLostError(f"node {self.name} is away: {self.problem}")
            answer = asyncio.get_running_loop().create_future()
            self._answers.append(answer)
            lost = asyncio.create_task(self._lost.wait())
            try:
                await link.send(question)
                await wait_first({lost, answer}, timeout_s)
                if answer.done() and isinstance(said := answer.result(), kind):
                    return said
                if lost.done():
                    raise NodeLostError(self.problem)
                raise NodeLostError(f"node {self.name} does not answer {type(question).__name__}")
            finally:
                await end_tasks(lost, answer)

    async def _read(self, link: NodeLink) -> None:
        try:
            while True:
                match said := await link.receive():
                    case messages.StoreRestarted():
                        self._on_store_restart()
                    case messages.Data():
                        raise ProtocolError(f"{link.peer} sends bytes in its session")
                    case _ if self._answers:
                        answer = self._answers.popleft()
                        if not answer.done():
                            answer.set_result(said)
                    case _:
                        raise ProtocolError(f"{link.peer} answers what nobody has asked")
        except (NodeLostError, ProtocolError) as error:
            await self._leave(str(error))
