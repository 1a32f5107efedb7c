"""Link between two regions, on one machine: bytes arrive later, in their order."""

from __future__ import annotations

import asyncio
import contextlib


class RegionLink:
    """A proxy on a port of its own that delays all bytes, each way.

    Attributes:
        url: URL to ask instead of that of the far end.
    """

    def __init__(self, to_port: int, delay_s: float) -> None:
        self._to_port, self._delay_s = to_port, delay_s
        self._writers: set[asyncio.StreamWriter] = set()
        self.url = ""

    async def start(self) -> RegionLink:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    @property
    def port(self) -> int:
        return int(self._server.sockets[0].getsockname()[1])

    def stop(self) -> None:
        """Carry nothing more; bytes on their way are lost."""
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._to_port)
        except OSError:
            self._writers.discard(writer)
            writer.transport.abort()
            return
        self._writers.add(far_writer)
        # Cancelled only as the loop ends, when no client is left.
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(
                self._one_way(reader, far_writer), self._one_way(far_reader, writer)
            )
        self._writers -= {writer, far_writer}

    async def _one_way(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        data = b"-"
        while data:
            try:
                data = await reader.read(65536)
            except OSError:
                data = b""
            loop.call_later(self._delay_s, _deliver, writer, data)


def _deliver(writer: asyncio.StreamWriter, data: bytes) -> None:
    if not data:
        writer.transport.abort()
    elif not writer.transport.is_closing():
        writer.write(data)
