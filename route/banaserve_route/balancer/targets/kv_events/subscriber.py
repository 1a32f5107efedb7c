"""Subscriptions to the KV cache events of a replica: ZeroMQ sockets, and replay of missed batches.

Each data-parallel rank publishes by itself, on the port of rank 0 plus its number. The publisher is
a PUB socket with messages of topic, sequence number (8 bytes, big-endian) and batch; a ROUTER
socket sends again the batches that it still keeps, from a given number on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic

import zmq
import zmq.asyncio

from banaserve_route.balancer.config import KvEndpoints
from banaserve_route.balancer.targets.health import run_periodically
from banaserve_route.balancer.targets.kv_events.reader import MAX_BATCH_BYTES, KvEventReader
from banaserve_route.policies.caches.known_caches import KnownCaches
from banaserve_route.policies.interface import ReplicaId

_END = (-1).to_bytes(8, "big", signed=True)
_AGAIN_S = 5.0
"""Time until a subscription that has failed is begun again."""
_ANSWER_S = 5.0
"""Maximum time for the next batch of a replay."""
_REPLAY_S = 60.0
"""Maximum time for a whole replay, and time until one that has failed is asked for again."""
_OPTIONS = {
    zmq.LINGER: 0,
    zmq.IPV6: 1,
    zmq.RCVHWM: 1000,
    zmq.MAXMSGSIZE: 4 * MAX_BATCH_BYTES,
    # A replica whose machine is gone is noticed, and connected to again when it is back.
    zmq.HEARTBEAT_IVL: 5000,
    zmq.HEARTBEAT_TIMEOUT: 15000,
}


class KvEventSubscriber:
    """Subscriptions of one replica, one for each of its data-parallel ranks.

    Attributes:
        endpoints: Addresses of the replica's events.
    """

    def __init__(
        self,
        replica: ReplicaId,
        endpoints: KvEndpoints,
        caches: KnownCaches,
        on_emptied: Callable[[], None],
        log: Callable[[str], None],
    ) -> None:
        """Add the replica to ``caches``; ``start`` begins the subscriptions.

        Args:
            on_emptied: Called when an engine has restarted or cleared its cache.
        """
        self.endpoints = endpoints
        self._what, self._log = f"following the KV events of {replica}", log
        views = caches.add(replica, endpoints.ranks)
        self._readers = [
            KvEventReader(view, caches, lambda line: log(f"{self._what}: {line}"), on_emptied)
            for view in views
        ]
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        for rank, reader in enumerate(self._readers):
            follower = _Follower(reader, *self.endpoints.of_rank(rank))
            step = run_periodically(follower.follow, _AGAIN_S, self._log, self._what)
            self._tasks.append(loop.create_task(step))

    def stop(self) -> None:
        while self._tasks:
            self._tasks.pop().cancel()

    def restarted(self) -> None:
        """Forget the views and begin again: the replica has been seen to restart."""
        self.stop()
        for reader in self._readers:
            reader.forget()
        self.start()


class _Follower:
    def __init__(self, reader: KvEventReader, events: str, replays: str) -> None:
        self._reader, self._events, self._replays = reader, events, replays
        self._num_restarts = 0
        self._replay_from_s = 0.0

    async def follow(self) -> None:
        """Take in batches until cancelled."""
        with _socket(zmq.SUB, self._events) as events:
            events.subscribe(b"")
            await self._complete()
            while True:
                await self._take(await events.recv_multipart())

    async def _take(self, message: list[bytes]) -> None:
        reader = self._reader
        if len(message) != 3 or len(message[1]) != 8:
            reader.fault("unreadable", "a message is no batch of events: is it another socket?")
            return
        seq, batch = int.from_bytes(message[1], "big"), reader.decode(message[2])
        if (first := reader.first_missed(seq)) is not None:
            reader.fault("gaps", f"batches {first} to {seq - 1} are missing")
            # The one before is asked for too: a later time of it shows that the engine restarted.
            await self._replay(max(0, first - 1))
        reader.take(seq, batch)
        await self._complete()

    async def _complete(self) -> None:
        """Ask for all batches if the view lacks some, unless this has turned out to be useless."""
        reader = self._reader
        if reader.num_restarts > self._num_restarts:
            self._num_restarts, self._replay_from_s = reader.num_restarts, 0.0
        if reader.is_whole or not self._replays or monotonic() < self._replay_from_s:
            return
        self._replay_from_s = monotonic() + _REPLAY_S
        reader.forget()
        await self._replay(0)

    async def _replay(self, first: int) -> None:
        """Take in the batches from ``first`` on that the replica still keeps."""
        again: int | None = first if self._replays else None
        while again is not None:
            with _socket(zmq.DEALER, self._replays) as replays:
                await replays.send_multipart([b"", again.to_bytes(8, "big")])
                again = await self._take_replay(replays, again)

    async def _take_replay(self, replays: zmq.asyncio.Socket, first: int) -> int | None:
        """Take in the answer to one demand; return the number from which to ask again, if any."""
        reader, is_empty, deadline_s = self._reader, True, monotonic() + _REPLAY_S
        while (left_s := deadline_s - monotonic()) > 0:
            try:
                message = await asyncio.wait_for(replays.recv_multipart(), min(_ANSWER_S, left_s))
            except TimeoutError:
                break
            # Older versions send no topic before number and batch.
            if len(message) < 3 or len(message[-2]) != 8:
                break
            if message[-2] == _END:
                if is_empty and not first:
                    reader.nothing_published()
                reader.replayed()
                return None
            is_empty, seq = False, int.from_bytes(message[-2], "big")
            missed = reader.first_missed(seq)
            if missed is not None and missed > first:
                # The ROUTER drops what its queue has no room for.
                return missed
            if reader.next is None and seq > 0:
                # The replica no longer keeps the first batches, and never will again.
                self._replay_from_s = float("inf")
            reader.take(seq, reader.decode(message[-1]))
            # What is at hand already is received without giving way to other tasks.
            await asyncio.sleep(0)
        reader.fault("failed_replays", "a replay of missed events has not come to its end")
        return None


def _socket(kind: int, address: str) -> zmq.asyncio.Socket:
    """Return a socket that connects to ``address`` in the background."""
    made = zmq.asyncio.Context.instance().socket(kind)
    try:
        for option, value in _OPTIONS.items():
            made.setsockopt(option, value)
        made.connect(address)
    except BaseException:
        made.close()
        raise
    return made
