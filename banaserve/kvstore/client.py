"""Client of the store, for an instance. Safe to call from any thread; a lost store is a miss."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

from banaserve.errors import StoreUnavailableError
from banaserve.fail_points import FailPoint, reach
from banaserve.kvstore import wire
from banaserve.kvstore.channel import FIRST_RETRY_S, StoreLink
from banaserve.kvstore.fingerprint import Fingerprint
from banaserve.kvstore.interface import Exchanged, Lease, Lookup, Slot
from banaserve.kvstore.pool import BoardView, PoolView
from banaserve.kvstore.stats import StoreStats

_LOOKUPS = tuple(sorted(Lookup))


class StoreClient:
    """Looks up, reads and writes blocks of one fingerprint.

    Calls take one round trip at most. While the store is away they answer at once that it holds
    nothing, and it is tried again with growing pauses (0.1 to 5 s); the log says so once when it
    goes and once when it is back. Every method may be called from any thread.

    A client has a name: connections with the same name, from any process, are one client, and
    what one of them reserved is not given to others before all their processes are dead.

    Args:
        socket_path: Where the store listens.
        fingerprint: What a block of this client means.
        client_name: Names the instance in messages and the store's log.
        num_writers: Processes of the instance that each write their share of a slot; 0: one for
            each part of the fingerprint.
        timeout_s: Longest wait for an answer.
        reconnect: Whether to try again once the store has gone.
        populate: Whether to fill the page tables of the pool in a background thread.
        maps_pool: False for who reads and writes no block: there is no ``view`` then.
    """

    def __init__(
        self,
        socket_path: str | Path,
        fingerprint: Fingerprint,
        *,
        client_name: str,
        num_writers: int = 0,
        timeout_s: float = 1.0,
        reconnect: bool = True,
        populate: bool = True,
        maps_pool: bool = True,
    ) -> None:
        self._fingerprint = fingerprint
        self._populate = populate
        self._maps_pool = maps_pool
        self._lock = threading.Lock()
        self._num_slots = 0
        self._view: PoolView | None = None
        self._board: BoardView | None = None
        self._link = StoreLink(
            Path(socket_path),
            fingerprint,
            client_name,
            num_writers=num_writers,
            timeout_s=timeout_s,
            reconnect=reconnect,
            on_open=self._map,
            on_lost=self._unmap,
        )

    def connect(self, within_s: float = 0.0) -> None:
        """Connect now, if not connected.

        Args:
            within_s: For how long to try again: a busy machine may keep the store from answering.

        Raises:
            StoreUnavailableError: There is no answer.
            FingerprintError: The store refuses to share blocks with this client.
        """
        until_s = time.monotonic() + within_s
        while True:
            try:
                with self._lock:
                    self._link.open()
                return
            except StoreUnavailableError:
                if time.monotonic() >= until_s:
                    raise
            time.sleep(FIRST_RETRY_S)

    @property
    def num_slots(self) -> int:
        """Slots in the pool of the present connection; 0 without one."""
        return self._num_slots

    @property
    def slot_bytes(self) -> int:
        """Size of a block in the store."""
        return self._fingerprint.slot_bytes

    def lookup(self, keys: Sequence[bytes]) -> list[Lookup]:
        """What the store knows of each key; leases nothing. All MISS while the store is away.

        A block in a tier below the pool is a HIT too.

        Raises:
            ValueError: A key is not of 16 to 64 bytes, or there are more than 65536.
            FingerprintError: At the first connection only.
        """
        _check_keys(keys)
        with self._lock:
            reply = self._link.call(lambda seq: wire.LookupKeys(seq, list(keys)), wire.Looked)
        if reply is None:
            return [Lookup.MISS] * len(keys)
        return [_LOOKUPS[state] for state in reply.states]

    def exchange(
        self,
        *,
        acquire: Sequence[bytes] = (),
        reserve: Sequence[tuple[bytes, bytes | None]] = (),
        tenant: bytes = b"",
        compute_block_s: float = 0.0,
        hold: int = 0,
        num_readers: int = 1,
    ) -> Exchanged:
        """Lease the longest prefix of ``acquire`` there is, and reserve slots for new blocks.

        Blocks of that prefix that lie in a tier below the pool are brought up where that pays;
        ``arrivals`` says when they are readable.

        Args:
            acquire: Keys in the order of their chain.
            reserve: (key, its parent's key or None) of blocks to write, parents first. Each slot
                granted must later be committed or abandoned.
            tenant: Who pays for slots, up to 64 bytes; the empty one is a tenant like any other.
            compute_block_s: What computing one of the acquired blocks would take; 0.0 where that
                is not known: then every block is fetched.
            hold: No block of these keys is evicted before ``end_hold`` of this number, or for five
                minutes; 0 holds none.
            num_readers: Number of decode legs that each end the hold, from 1 to 65536.

        Raises:
            ValueError: A key is not of 16 to 64 bytes, there are more than 65536, the tenant is
                too long, or ``compute_block_s`` is negative.
            FingerprintError: At the first connection only.
        """
        _check_keys(acquire)
        _check_keys([key for pair in reserve for key in pair if key is not None])
        _check_terms(tenant, compute_block_s)
        reach(FailPoint.CLIENT_BEFORE_EXCHANGE)
        with self._lock:
            reply = self._link.call(
                lambda seq: wire.ExchangeSlots(
                    seq, list(acquire), list(reserve), tenant, compute_block_s, hold, num_readers
                ),
                wire.SlotsGranted,
            )
            generation = self._link.generation
        if reply is None:
            return Exchanged(None, (), (None,) * len(reserve))
        slots = [Slot(index, generation, serial) for index, serial in reply.slots]
        lease = None
        if reply.lease_id is not None:
            lease = Lease(reply.lease_id, generation, len(slots))
        return Exchanged(
            lease,
            slots,
            [pair and Slot(pair[0], generation, pair[1]) for pair in reply.reserved],
            reply.num_ready,
            reply.wait_s,
            reply.undecided,
            reply.num_declined,
            reply.num_refused,
            reply.num_held,
            reply.num_unfetched,
        )

    def end_hold(self, hold: int, reader: int | None = None, also: str = "") -> None:
        """The blocks held by this number have been read, or will not be; does not wait.

        Args:
            reader: Decode leg that says so, from 0 on; None for all of them.
            also: ``HOST:PORT`` of the store that has pushed the blocks here; empty for none.
        """
        with self._lock:
            self._link.tell(wire.EndHold(self._link.generation, hold, reader, also))

    def arrivals(self, slots: Sequence[Slot]) -> list[Lookup]:
        """States of the leased ``slots``, without a message: under 1 us a slot.

        Returns:
            For each slot HIT where its block is readable, PENDING while it is on its way, MISS
            where it will not come, its lease has ended, or the store has gone.
        """
        board = self._board
        if board is None:
            return [Lookup.MISS] * len(slots)
        states = board.states(slots)
        if Lookup.PENDING in states and self._is_lost():
            return [Lookup.MISS if state is Lookup.PENDING else state for state in states]
        return states

    def push(
        self,
        to: str,
        keys: Sequence[bytes],
        tenant: bytes = b"",
        hold: int = 0,
        num_readers: int = 1,
    ) -> None:
        """Have a prompt's blocks sent to another machine's store, without waiting.

        Blocks that are being written follow as ``note_written`` says that their layers are, and
        can be read there soon after their commit. Where the store has no such peer, or it is away,
        nothing is sent: readers there fetch the blocks once they are committed.

        Args:
            to: ``HOST:PORT`` of the store, as this store knows its peer.
            keys: From the prompt's first block on, as acquired and reserved.
            tenant: Pays for the slots there.
            hold: Number under which the store there keeps all of them, or takes none; 0 keeps none.
            num_readers: As for ``exchange``.

        Raises:
            ValueError: As for ``exchange``.
        """
        _check_keys(keys)
        _check_terms(tenant, 0.0)
        with self._lock:
            terms = (tenant, hold, num_readers)
            self._link.tell(wire.PushBlocks(self._link.generation, to, list(keys), *terms))

    def note_written(self, slots: Sequence[Slot], num_layers: int, part: int = 0) -> None:
        """Say that ``part`` of the first layers of reserved slots is written, without waiting.

        Args:
            num_layers: So many, the first included; they are not written again.
        """
        serials = [slot.serial for slot in slots]
        if serials:
            with self._lock:
                told = wire.LayersWritten(slots[0].generation, serials, part, num_layers)
                self._link.tell(told)

    def commit(self, slots: Sequence[Slot], part: int = 0) -> bool:
        """Say that ``part`` of reserved slots is written, and wait until the store knows.

        A slot becomes readable when all parts are committed. Where the answer does not come, this
        part of the slots is abandoned.

        Returns:
            Whether the store accepted every slot. Either way this part of them is ended: the
            caller must not write there any more.
        """
        if not slots:
            return True
        serials = [slot.serial for slot in slots]
        generation = slots[0].generation
        if any(slot.generation != generation for slot in slots):
            raise ValueError("slots of several generations in one commit")
        reach(FailPoint.CLIENT_BEFORE_COMMIT)
        with self._lock:
            reply = self._link.call(
                lambda seq: wire.Commit(seq, generation, serials, part), wire.Committed
            )
            if reply is None:
                self._link.tell(wire.Abandon(generation, serials, part))
                return False
        reach(FailPoint.CLIENT_AFTER_COMMIT)
        return reply.all_accepted

    def abandon(self, slots: Sequence[Slot], part: int | None = None) -> None:
        """Give reserved slots back without commit, without waiting for the store.

        Args:
            slots: Reserved, and not written to any more.
            part: Whose writing has ended; None where no part is written any more. A slot becomes
                free when all parts have ended.
        """
        serials: dict[int, list[int]] = {}
        for slot in slots:
            serials.setdefault(slot.generation, []).append(slot.serial)
        with self._lock:
            for generation, group in serials.items():
                self._link.tell(wire.Abandon(generation, group, part))

    def release(self, lease: Lease) -> None:
        """End a lease, without waiting for the store."""
        with self._lock:
            self._link.tell(wire.ReleaseLeases(lease.generation, lease.id))

    def view(self, generation: int | None = None) -> PoolView:
        """The mapped pool. Keep the view while copies to or from it are in flight.

        Args:
            generation: Of the slots at hand. Where the pool known here is another, the store has
                been restarted, so the connection is made anew first.

        Raises:
            StoreUnavailableError: The store is away, or its pool is of another generation.
            FingerprintError: At the first connection only.
        """
        with self._lock:
            if self._view is None or generation not in (None, self._view.generation):
                self._link.refresh()
            view = self._view
        if view is None or generation not in (None, view.generation):
            raise StoreUnavailableError("the pool that these slots lie in is gone")
        return view

    def let_go_if_lost(self) -> None:
        """Unmap the pool of a store that is known to have gone; sends no message.

        As long as a client maps it, its memory is not free for the store that follows.
        """
        if self._lock.acquire(blocking=False):
            try:
                self._link.note_if_lost()
            finally:
                self._lock.release()

    def stats(self) -> StoreStats | None:
        """The store's counters and gauges; None while it is away."""
        with self._lock:
            reply = self._link.call(wire.GetStats, wire.Stats)
        return None if reply is None else reply.stats

    def clear(self) -> int | None:
        """Drop every block of every client that is not in use, from memory and tiers.

        Returns:
            How many went from memory; None while away.
        """
        with self._lock:
            reply = self._link.call(wire.Clear, wire.Cleared)
        return None if reply is None else reply.num_dropped

    def close(self) -> None:
        """Give everything back and disconnect for good. No copy may be in flight."""
        with self._lock:
            self._link.close()
            self._unmap()

    def _is_lost(self) -> bool:
        # While another thread calls the store, that call finds out.
        if not self._lock.acquire(blocking=False):
            return False
        try:
            return self._link.is_lost()
        finally:
            self._lock.release()

    def _map(self, welcome: wire.Welcome, pool_fd: int, board_fd: int) -> None:
        if self._board is not None and self._board.generation == welcome.generation:
            return
        self._num_slots = welcome.pool_bytes // welcome.slot_bytes
        if self._maps_pool:
            self._view = PoolView(
                pool_fd, welcome.pool_bytes, welcome.generation, self._fingerprint
            )
            if self._populate:
                self._view.populate_in_background()
        self._board = BoardView(board_fd, welcome.pool_bytes, welcome.generation)

    def _unmap(self) -> None:
        self._view = self._board = None
        self._num_slots = 0


def _check_keys(keys: Sequence[bytes]) -> None:
    if len(keys) > wire.MAX_KEYS:
        raise ValueError(f"{len(keys)} keys in one call, at most {wire.MAX_KEYS} are possible")
    for key in keys:
        if not wire.MIN_KEY_BYTES <= len(key) <= wire.MAX_KEY_BYTES:
            raise ValueError(
                f"a key has {len(key)} bytes, not {wire.MIN_KEY_BYTES} to {wire.MAX_KEY_BYTES}"
            )


def _check_terms(tenant: bytes, compute_block_s: float) -> None:
    if len(tenant) > wire.MAX_TENANT_BYTES:
        raise ValueError(f"a tenant of {len(tenant)} bytes, at most {wire.MAX_TENANT_BYTES}")
    if not 0.0 <= compute_block_s <= wire.MAX_COMPUTE_BLOCK_S:
        raise ValueError(f"{compute_block_s} seconds to compute a block")
