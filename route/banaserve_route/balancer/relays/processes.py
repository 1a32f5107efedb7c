"""Relays of a balancer: started, started again when they end, and ended with the balancer."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic
from typing import Any

from msgspec import structs

from banaserve.base.errors import UserError
from banaserve.base.platform.processes import spawn_module, wait_ended
from banaserve_route.balancer.balancer import Balancer
from banaserve_route.balancer.config import BalancerSettings
from banaserve_route.balancer.relays.link import RelayLink
from banaserve_route.balancer.relays.messages import (
    AcceptNoMore,
    EndRelay,
    RelaySettings,
    ToRelay,
)

_MODULE = "banaserve_route.balancer.relays.relay"
_SHORT_LIFE_S = 10.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_END_S, _EXIT_S = 5.0, 1.0

BEAT_S = 0.5
"""Time between two signs of life of a process."""

MAX_SILENT_BEATS = 20
"""Number of beats without a sign of life after which a process hangs: ten seconds.

An event loop that a busy machine or a large body holds up stands still for a second or two. The
observer counts its own beats, not the time: after it has stood still itself, as all processes do on
a machine that sleeps, the observed one has as many beats again.
"""

START_BEATS = 120
"""Number of beats in which a process must have begun: a minute, since it imports for seconds."""


class RestartPauses:
    """Pauses before restarts of a process, which grow while its lives are short."""

    def __init__(self) -> None:
        self._pause_s, self._began_s = _FIRST_PAUSE_S, monotonic()

    def next_s(self) -> float:
        """Return the pause after the life that has just ended, in seconds."""
        now_s = monotonic()
        is_short = now_s - self._began_s < _SHORT_LIFE_S
        pause_s = self._pause_s = (
            min(2 * self._pause_s, _LONGEST_PAUSE_S) if is_short else _FIRST_PAUSE_S
        )
        self._began_s = now_s + pause_s
        return pause_s


class Relays:
    """Relays on one port, each with a listening socket of its own.

    The kernel spreads connections over the sockets (``SO_REUSEPORT``). This process keeps them open
    too: connections that wait at the socket of a relay that has ended wait for the next one.
    """

    def __init__(self, balancer: Balancer, listening: Sequence[socket.socket], life: int) -> None:
        """
        Args:
            listening: Socket of each relay.
            life: Descriptor of a pipe at whose end relays end, also those of a killed balancer.
        """
        self._balancer = balancer
        self._all = [_Relay(balancer, sock, life) for sock in listening]
        self._tasks: list[asyncio.Task[None]] = []
        balancer.on_settings = self._tell_settings

    async def start(self) -> None:
        """Start the relays; return when all of them accept clients.

        Raises:
            UserError: A relay has ended instead.
        """
        self._tasks = [asyncio.get_running_loop().create_task(one.run()) for one in self._all]
        ready = asyncio.gather(*(one.ready.wait() for one in self._all))
        awaited: list[asyncio.Future[Any]] = [ready, *self._tasks]
        await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            ready.cancel()
            raise UserError("a process of the balancer has ended at its start: its error is above")

    def close(self) -> None:
        """Accept no more clients; requests under way go on."""
        for one in self._all:
            one.leave()
            one.sock.close()

    async def end(self) -> None:
        """End the relays and return when they have ended; kill those that take too long."""
        for one in self._all:
            one.end()
        _, pending = await asyncio.wait(self._tasks, timeout=_END_S)
        for task in pending:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _tell_settings(self, settings: BalancerSettings) -> None:
        for one in self._all:
            one.send(_told(settings))


class _Relay:
    """One relay at a time on one socket; ``pid`` is its process id."""

    def __init__(self, balancer: Balancer, sock: socket.socket, life: int) -> None:
        self._balancer, self.sock, self._life = balancer, sock, life
        self.ready = asyncio.Event()
        self._link: RelayLink | None = None
        self.pid = 0
        self._is_leaving = False

    async def run(self) -> None:
        """Run relays, one after another, until the balancer leaves, or the first has not begun."""
        pauses = RestartPauses()
        while True:
            how = await self._run_once()
            if self._is_leaving:
                return
            self._balancer.log(f"relay {self.pid} has ended: {how}")
            if not self.ready.is_set():
                return
            self._balancer.metrics.num_relay_ends += 1
            await asyncio.sleep(pauses.next_s())

    async def _run_once(self) -> str:
        """Run a relay to its end; return how it has ended."""
        try:
            ours, process = self._spawn()
        except OSError as error:
            return f"cannot start ({error.strerror})"
        link = RelayLink(self._balancer, self.ready.set)
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: link, sock=ours)
            self._link = link
            if self._is_leaving:
                return ""
            link.send(_told(self._balancer.settings))
            if await _hangs(link):
                return "it hung, and has been killed"
            with suppress(TimeoutError):
                async with asyncio.timeout(_EXIT_S):
                    await wait_ended(process.pid)
        finally:
            # Without its link it is of no use, whatever it does.
            process.kill()
            code = process.wait()
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def _spawn(self) -> tuple[socket.socket, subprocess.Popen[bytes]]:
        """Start a process; return this end of its link, and the process."""
        ours, theirs = socket.socketpair()
        descriptors = (self.sock.fileno(), theirs.fileno(), self._life)
        with theirs:
            process = spawn_module(
                _MODULE, [*map(str, descriptors)], b"", os.environ, pass_fds=descriptors
            )
        ours.setblocking(False)
        self.pid = process.pid
        return ours, process

    def send(self, message: ToRelay) -> None:
        """Send a message to the relay that runs."""
        if self._link is not None:
            self._link.send(message)

    def leave(self) -> None:
        """Start no more relays, and let the one that runs accept no more clients."""
        self._is_leaving = True
        self.send(AcceptNoMore())

    def end(self) -> None:
        """End the relay at once."""
        self._is_leaving = True
        self.send(EndRelay())


async def _hangs(link: RelayLink) -> bool:
    """Return False when a relay's link has ended, True when the relay has been silent too long."""
    num_silent = MAX_SILENT_BEATS - START_BEATS
    while num_silent < MAX_SILENT_BEATS:
        link.was_heard = False
        with suppress(TimeoutError):
            async with asyncio.timeout(BEAT_S):
                await link.lost.wait()
                return False
        num_silent = 0 if link.was_heard else num_silent + 1
    return True


def _told(settings: BalancerSettings) -> RelaySettings:
    """Return what a relay is told: it is told of replicas with each request."""
    return RelaySettings(structs.replace(settings, replicas=(), peers=()))
