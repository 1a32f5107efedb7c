"""Relay of Unix sockets of one machine to those of another, over a link.

vLLM's sockets carry pickles: the sockets stay files of one user on each machine, and their bytes
cross the network inside the link's TLS.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from banaserve.base.errors import ProtocolError
from banaserve.base.tasks import end_tasks
from banaserve.nodes.link import CHUNK_BYTES, NodeLink, NodeLostError
from banaserve.nodes.messages import MAX_CHANNELS, ChannelClosed, ChannelOpened, Data

SOCKET_NAMES = ("h", "i", "o")
"""Suffixes of the names of an engine's sockets: handshake, input and output."""


class Relay:
    """Connections to Unix sockets that continue over a link. Each side of the link has a relay.

    Attributes:
        used: Event that is set when the first process has connected to a socket of ``listen``.
    """

    def __init__(self, link: NodeLink) -> None:
        self.used = asyncio.Event()
        self._link = link
        self._numbers = itertools.count(1)
        self._open: dict[int, asyncio.StreamWriter] = {}
        self._servers: list[asyncio.Server] = []
        self._pumps: set[asyncio.Task[None]] = set()

    async def listen(self, stem: Path, names: Sequence[str]) -> None:
        """Accept connections to ``STEM.NAME`` for each name, and relay them to the other side.

        The folder must be private: the sockets are as accessible as the folder.
        """
        for name in names:
            path = Path(f"{stem}.{name}")
            accepted = partial(self._accepted, name)
            server = await asyncio.start_unix_server(accepted, path, limit=CHUNK_BYTES)
            self._servers.append(server)

    async def _accepted(
        self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if len(self._open) >= MAX_CHANNELS:
            writer.close()
            return
        self.used.set()
        channel = next(self._numbers)
        self._open[channel] = writer
        try:
            await self._link.send(ChannelOpened(channel, name))
        except NodeLostError:
            self._end(channel)
            return
        self._start_pump(channel, reader)

    async def opened(self, message: ChannelOpened, targets: Mapping[str, str]) -> None:
        """Connect to the socket here that a process on the other side has connected to.

        Args:
            targets: Paths of Unix sockets by the suffixes of their names.

        Raises:
            ProtocolError: There is no such socket, or there are too many connections.
        """
        if message.name not in targets or message.channel in self._open:
            raise ProtocolError(f"{self._link.peer} opens what nobody has offered")
        if len(self._open) >= MAX_CHANNELS:
            raise ProtocolError(f"{self._link.peer} opens more than {MAX_CHANNELS} connections")
        try:
            reader, writer = await asyncio.open_unix_connection(
                targets[message.name], limit=CHUNK_BYTES
            )
        except OSError:  # the socket library of the other side reconnects, as it does on this side
            await self._link.send(ChannelClosed(message.channel))
            return
        self._open[message.channel] = writer
        self._start_pump(message.channel, reader)

    async def took(self, data: Data) -> None:
        """Pass bytes from the link to the socket of their channel."""
        writer = self._open.get(data.channel)
        if writer is None:
            return  # the connection has been closed on this side meanwhile
        try:
            writer.write(data.content)
            await writer.drain()
        except (OSError, RuntimeError):
            self._end(data.channel)

    def closed(self, message: ChannelClosed) -> None:
        """Close a connection that the other side has closed."""
        self._end(message.channel)

    async def close(self) -> None:
        """Close all connections and listening sockets."""
        for server in self._servers:
            server.close()
        for channel in list(self._open):
            self._end(channel)
        await end_tasks(*self._pumps)

    def _end(self, channel: int) -> None:
        writer = self._open.pop(channel, None)
        if writer is not None:
            writer.close()

    def _start_pump(self, channel: int, reader: asyncio.StreamReader) -> None:
        pump = asyncio.create_task(self._pump(channel, reader))
        self._pumps.add(pump)
        pump.add_done_callback(self._pumps.discard)

    async def _pump(self, channel: int, reader: asyncio.StreamReader) -> None:
        """Send the bytes of a local connection over the link until the connection ends."""
        with contextlib.suppress(NodeLostError):  # the reader of the link learns of it
            with contextlib.suppress(OSError):
                while content := await reader.read(CHUNK_BYTES):
                    await self._link.send(Data(channel, content))
            if channel in self._open:
                self._end(channel)
                await self._link.send(ChannelClosed(channel))
