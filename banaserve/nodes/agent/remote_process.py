"""Engine core or guest that a node's agent runs for a server: its sockets, its log and its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from banaserve.base.errors import ProtocolError
from banaserve.base.platform.processes import wait_dying, wait_ended, wait_readable
from banaserve.base.tasks import end_tasks
from banaserve.nodes.link import CHUNK_BYTES, NodeLink, NodeLostError
from banaserve.nodes.messages import ChannelClosed, Data, LogWritten, ProcessDying, ProcessEnded
from banaserve.nodes.relay import Relay

Start = Callable[[Path], Awaitable[int]]
"""Function that starts the process, which logs to the given path, and returns its process id."""


class RemoteProcess:
    """Process that runs for as long as its connection lasts.

    Args:
        link: Connection to the server: the end of either the link or the process ends the other.
        stem: Prefix of the paths of the process's files, in a private folder.
        start: Function that starts the process.
        sockets: Suffixes of the names of the process's sockets.
    """

    def __init__(self, link: NodeLink, stem: Path, start: Start, sockets: Sequence[str]) -> None:
        self._link = link
        self._stem = stem
        self._start = start
        self._sockets = sockets
        self._relay = Relay(link)
        self._pid = 0

    async def run(self) -> None:
        """Return when the process has ended; it is killed if the server is gone.

        Raises:
            BanaServeError: The process could not be started.
        """
        log, reading = self._make_log()
        tasks: list[asyncio.Task[None]] = []
        try:
            await self._relay.listen(self._stem, self._sockets)
            self._pid = await self._start(log)
            copying = asyncio.create_task(self._copy_log(reading))
            waiting = asyncio.create_task(self._tell_of_end())
            obeying = asyncio.create_task(self._obey())
            tasks += [copying, waiting, obeying]
            await asyncio.wait({waiting, obeying}, return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                await self._copy_rest(reading)
                with contextlib.suppress(NodeLostError):
                    await self._link.send(ProcessEnded())
        finally:
            await end_tasks(*tasks)
            if self._pid:
                await _end(self._pid)
            os.close(reading)
            await self._relay.close()
            self._remove_files()

    def _make_log(self) -> tuple[Path, int]:
        """Return a named pipe and a descriptor to read it: a log takes no space on the node."""
        log = Path(f"{self._stem}.log")
        log.unlink(missing_ok=True)
        os.mkfifo(log, 0o600)
        # Open for writing too: otherwise the pipe would be at its end until the process opens it.
        return log, os.open(log, os.O_RDWR | os.O_NONBLOCK)

    async def _obey(self) -> None:
        """Relay the server's bytes to the process's sockets until the server is gone."""
        with contextlib.suppress(NodeLostError, ProtocolError):
            while True:
                match said := await self._link.receive():
                    case Data():
                        await self._relay.took(said)
                    case ChannelClosed():
                        self._relay.closed(said)
                    case _:
                        raise ProtocolError(f"{self._link.peer} sent a {type(said).__name__}")

    async def _tell_of_end(self) -> None:
        used = asyncio.create_task(self._relay.used.wait())
        ended = asyncio.create_task(wait_ended(self._pid))
        try:
            # An engine calls ``show_life`` some time after its start, and connects after that.
            await asyncio.wait({used, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                await wait_dying(self._pid)
            with contextlib.suppress(NodeLostError):
                await self._link.send(ProcessDying())
            await ended
        finally:
            await end_tasks(used, ended)
        self._pid = 0  # another process may have it by now

    async def _copy_log(self, reading: int) -> None:
        with contextlib.suppress(NodeLostError):
            while True:
                await wait_readable([reading])
                await self._copy_rest(reading)

    async def _copy_rest(self, reading: int) -> None:
        with contextlib.suppress(BlockingIOError, NodeLostError):
            while written := os.read(reading, CHUNK_BYTES):
                await self._link.send(LogWritten(written))

    def _remove_files(self) -> None:
        for left in self._stem.parent.glob(f"{self._stem.name}.*"):
            left.unlink(missing_ok=True)


async def _end(pid: int) -> None:
    """Kill a process and return when it has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    await wait_ended(pid)
