"""Connection between a server and a node: messages, bytes of other connections, and heartbeats."""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
from typing import NamedTuple

from banaserve.errors import BanaServeError, ProtocolError
from banaserve.nodes.credentials import ClusterCredentials
from banaserve.nodes.messages import MAX_FRAME_BYTES, Beat, NodeMessage, NodeRefused, decode, encode
from banaserve.platform.linux import since_received_s

BEAT_S = 0.5
SILENT_S = 2.5
"""With the beat, what a node had is gone for the server within three seconds."""
PATIENT_S = 15.0
"""Of a node that has nothing yet: there is nothing to lose, and it may be busy with its start."""
CONNECT_S = 5.0
CHUNK_BYTES = 64 << 10
_HEAD = struct.Struct("!II")
_MESSAGES = 0


class NodeLostError(BanaServeError):
    """A node does not answer any more, or refuses: what ran there is gone."""


class Data(NamedTuple):
    """Bytes of a channel."""

    channel: int
    content: bytes


class NodeLink:
    """One connection; both sides send beats, so that silence means that the other is gone.

    Args:
        peer: Its name, for errors.

    Attributes:
        silent_s: The other side is gone when it has said nothing for so long.
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
        self.silent_s = silent_s
        self._beating: asyncio.Task[None] | None = None

    async def send(self, message: NodeMessage) -> None:
        """Send a message; returns when most of what was sent is on its way.

        Raises:
            NodeLostError: The connection is broken.
        """
        await self._write(_MESSAGES, encode(message))

    async def send_data(self, channel: int, content: bytes) -> None:
        """Send bytes of a channel.

        Raises:
            NodeLostError: The connection is broken.
        """
        await self._write(channel, content)

    async def _write(self, channel: int, content: bytes) -> None:
        try:
            self._writer.writelines((_HEAD.pack(channel, len(content)), content))
            await self._writer.drain()
        except (OSError, RuntimeError) as error:
            raise NodeLostError(f"{self.peer} is gone: {_words(error)}") from error

    async def receive(self) -> NodeMessage | Data:
        """The next message or bytes; beats are no messages.

        Raises:
            NodeLostError: The other side has closed, or says nothing any more, or refuses.
            ProtocolError: What came is no frame.
        """
        while True:
            channel, num_bytes = _HEAD.unpack(await self._read(_HEAD.size))
            if num_bytes > MAX_FRAME_BYTES:
                raise ProtocolError(f"a frame of {num_bytes} bytes from {self.peer} is too large")
            content = await self._read(num_bytes)
            if channel != _MESSAGES:
                return Data(channel, content)
            match message := decode(content):
                case Beat():
                    continue
                case NodeRefused(reason):
                    raise NodeLostError(f"{self.peer} refuses: {reason}")
                case _:
                    return message

    async def _read(self, num_bytes: int) -> bytes:
        while True:
            try:
                async with asyncio.timeout(min(self.silent_s, SILENT_S)):  # it may change
                    return await self._reader.readexactly(num_bytes)
            except TimeoutError:
                if self._is_silent():
                    raise NodeLostError(
                        f"{self.peer} has said nothing for {self.silent_s:g} seconds"
                    ) from None
            except asyncio.IncompleteReadError:
                raise NodeLostError(f"{self.peer} has closed the connection") from None
            except OSError as error:
                raise NodeLostError(f"{self.peer} is gone: {_words(error)}") from error

    def _is_silent(self) -> bool:
        """Whether nothing has come: it may be this process that stood still."""
        sock = self._writer.get_extra_info("socket")
        try:
            return sock is None or since_received_s(sock) >= self.silent_s
        except OSError:
            return True

    def start_beats(self) -> None:
        """Let the other side know from here on that this one is there."""
        self._beating = asyncio.create_task(self._beat())

    async def _beat(self) -> None:
        with contextlib.suppress(NodeLostError):  # whoever reads learns of it
            while True:
                await self.send(Beat())
                await asyncio.sleep(BEAT_S)

    async def close(self) -> None:
        """End the connection; what has not been sent is lost."""
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.gather(self._beating, return_exceptions=True)
        self._writer.transport.abort()


async def connect(
    host: str, port: int, credentials: ClusterCredentials, silent_s: float = SILENT_S
) -> NodeLink:
    """A connection to a node's agent, with beats.

    Args:
        silent_s: As of ``NodeLink``.

    Raises:
        NodeLostError: Nobody answers there, or nobody with the cluster's key.
    """
    name = f"node {host}:{port}"
    try:
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await asyncio.open_connection(
                host, port, ssl=credentials.client, server_hostname="", limit=MAX_FRAME_BYTES
            )
    except TimeoutError:
        raise NodeLostError(f"{name} does not answer: is a firewall between?") from None
    except OSError as error:
        raise NodeLostError(f"{name}: {_words(error)}") from error
    link = NodeLink(reader, writer, name, silent_s)
    link.start_beats()
    return link


def accepted(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, silent_s: float
) -> NodeLink:
    """The link of a connection that was accepted; without beats until it has been believed."""
    host, port = writer.get_extra_info("peername")[:2]
    return NodeLink(reader, writer, f"server {host}:{port}", silent_s)


def _words(error: BaseException) -> str:
    """One line; OpenSSL's own words hide what a user can do."""
    said = str(error)
    if "CERTIFICATE" in said.upper() or "UNKNOWN_CA" in said.upper():
        return "it has another cluster key"
    if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)  # asyncio's words name a function
    return said or type(error).__name__
