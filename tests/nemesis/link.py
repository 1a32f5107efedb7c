"""A line between two processes of which nothing comes through for a while, as a network's."""

from __future__ import annotations

import asyncio
import contextlib
import threading

_CHUNK_BYTES = 1 << 16


class Link:
    """Hands on what comes to a port, until it is cut: then connections stay, and are silent.

    Args:
        port: Where it listens.
        target: Port of the other end, which may come and go.
    """

    def __init__(self, port: int, target: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._port, self._target = port, target
        self._loop = asyncio.new_event_loop()
        self._passes = asyncio.Event()
        self._passes.set()
        self._over = asyncio.Event()
        listens = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(listens,), name="link")
        self._thread.start()
        assert listens.wait(10.0)

    def cut(self) -> None:
        self._loop.call_soon_threadsafe(self._passes.clear)

    def mend(self) -> None:
        """What was under way goes on, as after lost packets."""
        self._loop.call_soon_threadsafe(self._passes.set)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    def _run(self, listens: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve(listens))
        self._loop.close()

    async def _serve(self, listens: threading.Event) -> None:
        server = await asyncio.start_server(self._connected, "127.0.0.1", self._port)
        listens.set()
        await self._over.wait()
        server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._passes.wait()
        try:
            other = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.close()
            return
        there = asyncio.create_task(self._pass_on(reader, other[1]))
        back = asyncio.create_task(self._pass_on(other[0], writer))
        try:
            await asyncio.gather(there, back)
        finally:
            for end in (writer, other[1]):
                end.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Bytes of one direction, until its end, which is passed on too."""
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK_BYTES):
                await self._passes.wait()
                writer.write(data)
                await writer.drain()
            await self._passes.wait()
        with contextlib.suppress(OSError):
            writer.write_eof()
