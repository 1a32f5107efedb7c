"""Process that accepts clients and relays bytes, while the balancer at its link decides.

``python -m banaserve_route.balancer.relays.relay LISTENING LINK LIFE``, all numbers of descriptors.
LIFE is a pipe that ends with the command that has started all processes.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import Any, cast

from banaserve.base.net.connections import ConnectionTable, Evictable
from banaserve.base.net.framing import MessageReader
from banaserve.base.net.loop_watch import LoopWatch
from banaserve.base.net.tls import Certificates, ClientListener
from banaserve.cli.terminal.console import print_error
from banaserve.kvstore.sizes import parse_size
from banaserve_route.balancer.event_loop import run_until_complete
from banaserve_route.balancer.head_checks import HeadChecks
from banaserve_route.balancer.http.client_connection import ClientConnection, until_flushed
from banaserve_route.balancer.http.listening import listen
from banaserve_route.balancer.http.request import ClientRequest, RequestRefusedError
from banaserve_route.balancer.relays.messages import (
    TO_BALANCER,
    TO_RELAY,
    AcceptNoMore,
    ClientClosed,
    ClientKnown,
    ClientOpened,
    CloseClient,
    DropAttempt,
    DropNoted,
    EndRelay,
    EndRequest,
    RefusalNoted,
    RelayAlive,
    RelayReady,
    RelaySettings,
    RequestArrived,
    SendRequest,
    ToBalancer,
    TurnAway,
    WriteAnswer,
)
from banaserve_route.balancer.relays.relayed_request import RelayedRequest
from banaserve_route.balancer.relays.server_pools import ServerPools
from banaserve_route.balancer.targets.health import run_periodically

_TICK_S = 0.5


def main(argv: Sequence[str]) -> int:
    """Relay until the balancer ends this process, or has ended itself; return the exit code."""
    # A service manager may send these to all processes: the balancer says when to end.
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    *numbers, life = map(int, argv)
    listening, link = (socket.socket(fileno=number) for number in numbers)
    run_until_complete(_serve(listening, link, life))
    return 0


async def _serve(listening: socket.socket, link: socket.socket, life: int) -> None:
    relay, loop = RelayProcess(print_error), asyncio.get_running_loop()
    loop.add_reader(life, relay.lose_supervisor, life)
    link.setblocking(False)
    await loop.create_unix_connection(lambda: relay, sock=link)
    await relay.told.wait()
    if relay.ended.is_set():
        return
    listener: ClientListener = await listen(relay, listening)
    relay.send(RelayReady())
    ticking = loop.create_task(run_periodically(relay.tick, _TICK_S, print_error, "a relay's tick"))
    await relay.leaving.wait()
    listener.close()
    listening.close()
    await relay.ended.wait()
    # The balancer limits the time, by killing this process.
    await until_flushed(relay.clients.values())
    ticking.cancel()


class RelayProcess(asyncio.Protocol):
    """Clients of this process, and its end of the connection to the balancer.

    It has neither counts nor a policy.

    Attributes:
        told: Event that is set when the balancer has sent its settings.
        leaving: Event that is set when no more clients are to be accepted.
        ended: Event that is set when this process is to end.
        clients: Connections of clients by their numbers in messages.
        connections: Connections in a TLS handshake.
    """

    def __init__(self, log: Callable[[str], None]) -> None:
        self.log = log
        self.told, self.leaving, self.ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.certificates: Certificates | None = None
        self.connections: ConnectionTable[Evictable] = ConnectionTable(1)
        self._reader = MessageReader(TO_RELAY)
        self.clients: dict[int, ClientConnection] = {}
        self._numbers: dict[ClientConnection, int] = {}
        self._known: set[ClientConnection] = set()
        self._requests: dict[int, RelayedRequest] = {}
        self._pools = ServerPools(log)
        self._num_clients = self._num_requests = self._buffered_bytes = 0
        self._is_alone, self._is_supervised = False, True
        self._watch = LoopWatch(_TICK_S)
        self._takers: Mapping[type, Callable[[Any], None]] = {
            RelaySettings: self._take_settings,
            SendRequest: self._to_request,
            DropAttempt: self._to_request,
            WriteAnswer: self._to_request,
            EndRequest: self._to_request,
            CloseClient: self._close_client,
            TurnAway: self._turn_away,
            AcceptNoMore: lambda _: self._leave(),
            EndRelay: lambda _: self.end(),
        }

    # The link to the balancer.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._link = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        while (message := self._reader.take()) is not None:
            self._takers[type(message)](message)

    def connection_lost(self, exc: Exception | None) -> None:
        """End after the answers under way: the balancer has ended."""
        self._is_alone = True
        if not self.told.is_set() or not self._is_supervised:
            self.end()
            return
        self._leave()
        for request in list(self._requests.values()):
            request.give_up()
        if not self.clients:
            self.end()
        asyncio.get_running_loop().call_later(self.settings.limits.request_timeout_s, self.end)

    def lose_supervisor(self, life: int) -> None:
        """End with the balancer, or at once if it has ended: nothing starts it again."""
        asyncio.get_running_loop().remove_reader(life)
        self._is_supervised = False
        if self._is_alone:
            self.end()

    def end(self) -> None:
        """End this process at once."""
        for event in (self.told, self.leaving, self.ended):
            event.set()

    def send(self, message: ToBalancer) -> None:
        if not self._link.is_closing():
            self._link.write(TO_BALANCER.encode(message))

    def _take_settings(self, told: RelaySettings) -> None:
        self.settings = settings = told.settings
        limits = settings.limits
        self.max_body_bytes = parse_size(limits.max_body)
        self.body_timeout_s = limits.body_timeout_s
        self._max_buffered_bytes = settings.buffered_bytes_of_relay
        self.connections.max_connections = max(1, limits.max_connections // settings.processes)
        self.connections.max_per_address = limits.max_connections_per_address
        self._checks = HeadChecks(settings)
        self._pools.take_settings(settings)
        self.told.set()

    def _to_request(self, told: SendRequest | DropAttempt | WriteAnswer | EndRequest) -> None:
        if (request := self._requests.get(told.request)) is not None:
            request.take(told)

    def _close_client(self, told: CloseClient) -> None:
        is_meant = not told.request or told.request in self._requests
        if is_meant and (client := self.clients.get(told.client)) is not None:
            client.evict()

    def _turn_away(self, told: TurnAway) -> None:
        if (client := self.clients.get(told.client)) is not None:
            client.turn_away()

    def _leave(self) -> None:
        self.leaving.set()
        for client in list(self._numbers):
            client.leave_if_idle()

    # Handlers of the clients' events.

    def opened(self, client: ClientConnection) -> bool:
        self._num_clients += 1
        number, peer = self._num_clients, client.peer
        self.clients[number], self._numbers[client] = client, number
        named = peer if isinstance(peer, tuple) else ("", os.getpid(), number)
        self.send(ClientOpened(number, named))
        return True

    def closed(self, client: ClientConnection) -> None:
        number = self._numbers.pop(client)
        del self.clients[number]
        self._known.discard(client)
        self.send(ClientClosed(number))
        if self._is_alone and not self.clients:
            self.end()

    def check_head(self, client: ClientConnection, message: ClientRequest) -> None:
        if self._checks.is_own(message):
            return
        if self._checks.check_key(message) and client not in self._known:
            self._known.add(client)
            self.send(ClientKnown(self._numbers[client]))
        self._checks.is_passed(message)

    def hold(self, num_bytes: int) -> None:
        self._buffered_bytes += num_bytes
        if num_bytes > 0 and self._buffered_bytes > self._max_buffered_bytes:
            self._buffered_bytes -= num_bytes
            raise RequestRefusedError(503, "too many bodies are held in memory; try again shortly")

    def take(self, client: ClientConnection, message: ClientRequest) -> RelayedRequest:
        if self.leaving.is_set():
            client.can_go_on = False
        self._num_requests += 1
        request = RelayedRequest(
            self._num_requests, client, message, self._pools, self.send, self._requests.pop
        )
        self._requests[request.number] = request
        if self._is_alone:
            request.give_up()
            return request
        self.send(
            RequestArrived(
                request.number,
                self._numbers[client],
                message.method,
                message.path,
                message.seen,
                client.can_go_on,
                message.body[0] if len(message.body) == 1 else b"".join(message.body),
            )
        )
        return request

    def refused(self, error: RequestRefusedError) -> None:
        self.send(RefusalNoted(error.status, str(error)))

    def dropped(self, cause: str, why: str) -> None:
        self.send(DropNoted(cause, why))

    async def tick(self) -> None:
        """Do the periodic work."""
        self.send(RelayAlive())
        now_s = monotonic()
        if self._watch.tick(now_s):
            self.log(f"a relay's event loop stood still for {self._watch.lag_s:.1f} s")
        if self._watch.may_enforce():
            for client in list(self._numbers):
                client.sweep(now_s)
        self._pools.sweep(now_s)
        if self.certificates is not None:
            self.certificates.look()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
