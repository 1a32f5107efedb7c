"""Process of a balancer: its socket, its event loop, and a shutdown that lets requests finish."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

from banaserve.base.net.tls import ClientListener
from banaserve_route.balancer.balancer import TICK_S, Balancer
from banaserve_route.balancer.config import BalancerSettings
from banaserve_route.balancer.config_file import follow
from banaserve_route.balancer.discovery import Discovery
from banaserve_route.balancer.event_loop import run_until_complete
from banaserve_route.balancer.http.listening import listen
from banaserve_route.balancer.relays.processes import Relays
from banaserve_route.balancer.relays.supervisor import Supervision

_TICKS_A_SLOW_ONE = 5


def run(
    make: Callable[[BalancerSettings], Balancer],
    discovery: Discovery,
    listening: Sequence[socket.socket],
    on_ready: Callable[[], None],
    config: Path | None = None,
    supervision: Supervision | None = None,
) -> int:
    """Serve until SIGINT or SIGTERM; return 128 plus the signal's number.

    There is a socket for each relay, or, without ``supervision``, one for this process. The
    settings follow changes of the file ``config``, if there is one, and of the addresses of names.

    After the first signal, requests under way may finish within a limited time; the second signal
    ends the process at once.
    """
    return run_until_complete(serve(make, discovery, listening, on_ready, config, supervision))


async def serve(
    make: Callable[[BalancerSettings], Balancer],
    discovery: Discovery,
    listening: Sequence[socket.socket],
    on_ready: Callable[[], None],
    config: Path | None,
    supervision: Supervision | None,
) -> int:
    """Serve as ``run`` does, within a running event loop of the main thread."""
    loop = asyncio.get_running_loop()
    signals: asyncio.Queue[int] = asyncio.Queue()
    if supervision is not None:
        loop.add_reader(supervision.signals, _take_signals, supervision.signals, signals)
    else:
        for each in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(each, signals.put_nowait, int(each))
    await discovery.look()
    balancer = make(discovery.settings)
    # Before replicas are probed, which may take long, and after all that blocks the event loop.
    beating = [] if supervision is None else [loop.create_task(supervision.beat())]
    await balancer.start()
    tasks = [
        *beating,
        loop.create_task(tick(balancer)),
        loop.create_task(discovery.follow(balancer)),
    ]
    if config is not None:
        tasks.append(loop.create_task(follow(config, balancer, discovery)))
    async with accepting(balancer, listening, supervision) as server:
        on_ready()
        try:
            number = await signals.get()
            server.close()
            await drain(balancer, signals)
        finally:
            for task in tasks:
                task.cancel()
            balancer.close()
    return 128 + number


def _take_signals(descriptor: int, signals: asyncio.Queue[int]) -> None:
    """Read the numbers of signals; the end of the supervisor counts as SIGTERM."""
    numbers = os.read(descriptor, 64)
    if not numbers:
        asyncio.get_running_loop().remove_reader(descriptor)
    for number in numbers or (signal.SIGTERM,):
        signals.put_nowait(int(number))


@contextlib.asynccontextmanager
async def accepting(
    balancer: Balancer, listening: Sequence[socket.socket], supervision: Supervision | None
) -> AsyncIterator[ClientListener | Relays]:
    """Accept clients, in this process or in relays that end with the block.

    Raises:
        UserError: The certificate cannot be used, or a relay does not start.
    """
    if supervision is None:
        yield await listen(balancer, listening[0])
        return
    relays = Relays(balancer, listening, supervision.life)
    try:
        await relays.start()
        yield relays
    finally:
        await relays.end()


async def tick(balancer: Balancer) -> None:
    """Do the balancer's periodic work."""
    while True:
        for _ in range(_TICKS_A_SLOW_ONE):
            await asyncio.sleep(TICK_S)
            _guarded(balancer.tick, balancer)
        _guarded(balancer.tick_slowly, balancer)


def _guarded(step: Callable[[], None], balancer: Balancer) -> None:
    """Run a step and log its exception: if the clock stopped, no time limit would hold any more."""
    try:
        step()
    except Exception as error:
        balancer.log(f"a step of the clock failed: {error!r}")


async def drain(balancer: Balancer, signals: asyncio.Queue[int]) -> None:
    """Take no more requests; return when none is under way, time is up or another signal comes."""
    balancer.leave()
    again = asyncio.ensure_future(signals.get())
    idle = asyncio.ensure_future(balancer.idle())
    await asyncio.wait(
        (again, idle),
        timeout=balancer.settings.limits.drain_s,
        return_when=asyncio.FIRST_COMPLETED,
    )
    again.cancel()
    idle.cancel()
