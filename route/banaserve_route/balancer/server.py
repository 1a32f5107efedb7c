"""Process of a balancer: its socket, its event loop, and a shutdown that lets requests finish."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import uvloop

from banaserve.base.net.tls import ClientListener
from banaserve_route.balancer.balancer import TICK_S, Balancer
from banaserve_route.balancer.config import BalancerSettings
from banaserve_route.balancer.config_file import follow
from banaserve_route.balancer.discovery import Discovery
from banaserve_route.balancer.http.listening import listen
from banaserve_route.balancer.relays.processes import Relays

_TICKS_A_SLOW_ONE = 5


def run(
    make: Callable[[BalancerSettings], Balancer],
    discovery: Discovery,
    sock: socket.socket,
    on_ready: Callable[[], None],
    config: Path | None = None,
) -> int:
    """Serve on ``sock`` until SIGINT or SIGTERM; return 128 plus the signal's number.

    The settings follow changes of the file ``config``, if there is one, and of the addresses of
    names.

    After the first signal, requests under way may finish within a limited time; the second signal
    ends the process at once.
    """
    # Objects allocated so far stay, and requests make no cycles, so searching for them can be rare.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serve(make, discovery, sock, on_ready, config))


async def serve(
    make: Callable[[BalancerSettings], Balancer],
    discovery: Discovery,
    sock: socket.socket,
    on_ready: Callable[[], None],
    config: Path | None,
) -> int:
    """Serve as ``run`` does, within a running event loop of the main thread."""
    loop = asyncio.get_running_loop()
    signals: asyncio.Queue[int] = asyncio.Queue()
    for each in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(each, signals.put_nowait, int(each))
    await discovery.look()
    balancer = make(discovery.settings)
    await balancer.start()
    tasks = [loop.create_task(tick(balancer)), loop.create_task(discovery.follow(balancer))]
    if config is not None:
        tasks.append(loop.create_task(follow(config, balancer, discovery)))
    async with accepting(balancer, sock) as server:
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


@contextlib.asynccontextmanager
async def accepting(
    balancer: Balancer, sock: socket.socket
) -> AsyncIterator[ClientListener | Relays]:
    """Accept clients on ``sock``, in this process or in relays that end with the block.

    Raises:
        UserError: The certificate cannot be used, or a relay does not start.
    """
    if balancer.settings.processes == 1:
        yield await listen(balancer, sock)
        return
    relays = Relays(balancer, sock)
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
