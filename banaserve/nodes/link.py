"""Connection between a server and a node: messages, bytes of other connections, and heartbeats."""

from __future__ import annotations

import asyncio
import contextlib
import os

from banaserve.base.errors import BanaServeError
from banaserve.base.net.framing import MessageReader, receive_async
from banaserve.base.platform.linux import since_received_s
from banaserve.base.tasks import end_tasks
from banaserve.nodes.credentials import ClusterCredentials
from banaserve.nodes.messages import FRAMING, MAX_MESSAGE_BYTES, Beat, NodeMessage, NodeRefused

BEAT_S = 0.5
SILENT_S = 2.5
"""Silence after which a peer is lost, in seconds: with the beat, within three seconds."""
PATIENT_S = 15.0
"""The same limit for a node that runs nothing yet: nothing can be lost, and it may be starting."""
WAITS_PER_SILENCE = 5
"""Number of waits into which the silence of a peer is divided."""
CONNECT_S = 5.0
CHUNK_BYTES = 64 << 10


class NodeLostError(BanaServeError):
    """A node no longer answers, or refuses: all that ran there is gone."""


class NodeLink:
    """Connection on which both sides send heartbeats, so that silence means the peer is gone.

    Args:
        peer: Name of the other side, for errors.

    Attributes:
        silent_s: Silence after which the other side counts as gone, in seconds.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        peer: str,
        silent_s: float = SILENT_S,
    ) -> None:
        self.peer = peer
        self._reader, self._writer = reader, writer
        self._messages = MessageReader(FRAMING)
        self.silent_s = silent_s
        self._beating: asyncio.Task[None] | None = None

    async def send(self, message: NodeMessage) -> None:
        """Send a message; return when most of what was sent has left the write buffer.

        Raises:
            NodeLostError: The connection is broken.
            ProtocolError: The message is longer than the other side accepts.
        """
        frame = FRAMING.encode(message)
        try:
            self._writer.write(frame)
            await self._writer.drain()
        except (OSError, RuntimeError) as error:
            raise NodeLostError(f"{self.peer} is gone: {_words(error)}") from error

    async def receive(self) -> NodeMessage:
        """Return the next message; heartbeats are skipped.

        Raises:
            NodeLostError: The other side has closed the connection, is silent, or refuses.
            ProtocolError: The bytes received are not a message.
        """
        while True:
            match message := await receive_async(self._read, self._messages):
                case None:
                    raise NodeLostError(f"{self.peer} has closed the connection")
                case Beat():
                    continue
                case NodeRefused(reason):
                    raise NodeLostError(f"{self.peer} refuses: {reason}")
                case _:
                    return message

    async def _read(self, num_bytes: int) -> bytes:
        """Return received bytes, also more than ``num_bytes``; none at the end."""
        waited_s = 0.0
        while True:
            wait_s = min(self.silent_s, SILENT_S) / WAITS_PER_SILENCE  # silent_s may change
            try:
                async with asyncio.timeout(wait_s):
                    return await self._reader.read(MAX_MESSAGE_BYTES)
            except TimeoutError:
                # A wait that ended late counts with its planned length: if the whole machine stood
                # still, the peer's beats may have stood still with it.
                waited_s += wait_s
                if waited_s >= self.silent_s and self._is_silent():
                    raise NodeLostError(
                        f"{self.peer} has said nothing for {self.silent_s:g} seconds"
                    ) from None
            except OSError as error:
                raise NodeLostError(f"{self.peer} is gone: {_words(error)}") from error

    def _is_silent(self) -> bool:
        """Return whether the socket has received nothing; this process may have stalled instead."""
        sock = self._writer.get_extra_info("socket")
        try:
            return sock is None or since_received_s(sock) >= self.silent_s
        except OSError:
            return True

    def start_beats(self) -> None:
        """Begin to send heartbeats, which show the other side that this one is alive."""
        self._beating = asyncio.create_task(self._beat())

    async def _beat(self) -> None:
        with contextlib.suppress(NodeLostError):  # the reader of the link learns of it
            while True:
                await self.send(Beat())
                await asyncio.sleep(BEAT_S)

    async def close(self) -> None:
        """End the connection; unsent bytes are lost."""
        self._writer.transport.abort()  # first: the wait may be cancelled
        await end_tasks(self._beating)


async def connect(
    host: str, port: int, credentials: ClusterCredentials, silent_s: float = SILENT_S
) -> NodeLink:
    """Return a connection to a node's agent, with heartbeats.

    Args:
        silent_s: Silence after which the agent counts as gone, in seconds.

    Raises:
        NodeLostError: No agent answers there, or the one that answers has another cluster key.
    """
    name = f"node {host}:{port}"
    try:
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await asyncio.open_connection(
                host, port, ssl=credentials.client, server_hostname="", limit=MAX_MESSAGE_BYTES
            )
    except TimeoutError:
        raise NodeLostError(f"{name} does not answer: is a firewall between?") from None
    except (OSError, UnicodeError) as error:  # no name of a host may be such as a..b
        raise NodeLostError(f"{name}: {_words(error)}") from error
    link = NodeLink(reader, writer, name, silent_s)
    link.start_beats()
    return link


def accepted(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, silent_s: float
) -> NodeLink:
    """Return the link of an accepted connection; heartbeats start after its first message."""
    host, port = writer.get_extra_info("peername")[:2]
    return NodeLink(reader, writer, f"server {host}:{port}", silent_s)


def _words(error: BaseException) -> str:
    """Describe an error in one line; OpenSSL's messages do not show what a user can do."""
    said = str(error)
    if "CERTIFICATE" in said.upper() or "UNKNOWN_CA" in said.upper():
        return "it has another cluster key"
    if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)  # asyncio's message names a function
    return said or type(error).__name__
