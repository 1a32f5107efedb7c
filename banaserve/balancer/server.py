"""Process of a balancer: a socket, an event loop, and an end that lets requests finish."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import uvloop

from banaserve.balancer.balancer import TICK_S, Balancer
from banaserve.balancer.config_file import follow
from banaserve.balancer.http.client_connection import ClientConnection
from banaserve.net.keep_alive import keep_alive
from banaserve.net.tls import Certificates
from banaserve.net.tls_listener import ClientListener, TlsListener

_TICKS_A_SLOW_ONE = 5
_BACKLOG = 2048
_HANDSHAKE_S = 10.0


def run(
    make: Callable[[], Balancer],
    sock: socket.socket,
    on_ready: Callable[[], None],
    config: Path | None = None,
) -> int:
    """Serve on ``sock`` until SIGINT or SIGTERM; returns 128 and the signal's number.

    The settings follow the file ``config``, where there is one.

    The first signal lets requests under way finish, for a limited time; the second ends at once.
    """
    # What is allocated so far stays, and requests make no cycles, so looking for them can be rare.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serve(make, sock, on_ready, config))


async def serve(
    make: Callable[[], Balancer],
    sock: socket.socket,
    on_ready: Callable[[], None],
    config: Path | None,
) -> int:
    """As ``run``, within a running loop of the main thread."""
    loop = asyncio.get_running_loop()
    signals: asyncio.Queue[int] = asyncio.Queue()
    for each in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(each, signals.put_nowait, int(each))
    balancer = make()
    await balancer.start()
    tasks = [loop.create_task(tick(balancer))]
    if config is not None:
        tasks.append(loop.create_task(follow(config, balancer)))
    server = await listen(balancer, sock)
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


async def listen(balancer: Balancer, sock: socket.socket) -> ClientListener:
    """Accept clients on ``sock``, with TLS where the settings name a certificate.

    Raises:
        UserError: The certificate cannot be used.
    """
    keep_alive(sock)
    if (tls := balancer.settings.server_tls) is None:
        loop = asyncio.get_running_loop()
        return await loop.create_server(
            lambda: ClientConnection(balancer), sock=sock, backlog=_BACKLOG
        )
    balancer.certificates = Certificates(tls, balancer.log)
    return TlsListener(
        sock,
        lambda: ClientConnection(balancer),
        balancer.certificates,
        balancer.connections,
        _HANDSHAKE_S,
        lambda cause: balancer.dropped(cause, "a connection has ended before its TLS handshake"),
    )


async def tick(balancer: Balancer) -> None:
    """Keep the balancer's time."""
    while True:
        for _ in range(_TICKS_A_SLOW_ONE):
            await asyncio.sleep(TICK_S)
            _guarded(balancer.tick, balancer)
        _guarded(balancer.tick_slowly, balancer)


def _guarded(step: Callable[[], None], balancer: Balancer) -> None:
    """Time goes on whatever one step meets: without it no limit would hold any more."""
    try:
        step()
    except Exception as error:
        balancer.log(f"a step of the clock failed: {error!r}")


async def drain(balancer: Balancer, signals: asyncio.Queue[int]) -> None:
    """Return when nothing is under way, time is up or another signal has come."""
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
