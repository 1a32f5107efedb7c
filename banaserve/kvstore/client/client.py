"""Client of the store, for an instance. Thread-safe; a lost store counts as a miss."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from banaserve.base.errors import StoreUnavailableError
from banaserve.base.platform.fail_points import FailPoint, reach
from banaserve.kvstore import wire
from banaserve.kvstore.client.channel import FIRST_RETRY_S, StoreChannel, StoreLink
from banaserve.kvstore.fingerprint import Fingerprint
from banaserve.kvstore.leases import Exchanged, Lease, Lookup, Slot
from banaserve.kvstore.pool import BoardView, PoolView
from banaserve.kvstore.stats import StoreStats

_LOOKUPS = tuple(sorted(Lookup))


class StoreClient:
    """Client that looks up, reads and writes blocks of one fingerprint.

    A call takes one round trip at most. While the store is away, calls return at once as if the
    store held nothing, and the client reconnects with growing pauses (0.1 to 5 s); it logs once
    when the store is lost and once when it is back. Every method may be called from any thread.

    A client has a name: connections with the same name, from any process, are one client, and
    slots that one of them reserved are not given to other clients before all its processes are
    dead.

    Args:
        socket_path: Path of the socket on which the store listens.
        fingerprint: Fingerprint of this client's blocks.
        client_name: Name of the instance in messages and in the store's log.
        num_writers: Number of processes of the instance that each write their share of a slot; 0:
            one for each part of the fingerprint.
        timeout_s: Maximum wait for an answer, in seconds.
        populate: True to fill the page tables of the pool in a background thread.
        maps_pool: False for a client that reads and writes no block: it has no ``view``.
    """

    def __init__(
        self,
        socket_path: str | Path,
        fingerprint: Fingerprint,
        *,
        client_name: str,
        num_writers: int = 0,
        timeout_s: float = 1.0,
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
            partial(
                StoreChannel, Path(socket_path), client_name, fingerprint, num_writers, timeout_s
            ),
            on_open=self._map,
            on_lost=self._unmap,
        )

    def connect(self, within_s: float = 0.0) -> None:
        """Connect now, if not connected; keep trying for ``within_s`` seconds.

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
        """Number of slots in the pool of the current connection; 0 without a connection."""
        return self._num_slots

    @property
    def slot_bytes(self) -> int:
        """Size of a block in the store, in bytes."""
        return self._fingerprint.slot_bytes

    def lookup(self, keys: Sequence[bytes]) -> list[Lookup]:
        """Return the state of each key without a lease; all MISS while the store is away.

        A block in a tier below the pool is a HIT too.

        Raises:
            ValueError: A key is not of 16 to 64 bytes, or there are more than 65536 keys.
            FingerprintError: At the first connection only.
        """
        _check_keys(keys)
        with self._lock:
            reply = self._link.call(lambda seq: wire.LookupKeys(seq, list(keys)), wire.LookupStates)
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
        is_repeated: bool = False,
    ) -> Exchanged:
        """Lease the longest prefix of ``acquire`` in the store, and reserve slots for new blocks.

        Blocks of that prefix that are in a tier below the pool are promoted if that saves time;
        ``arrivals`` shows whether they are readable.

        Args:
            acquire: Keys in the order of their chain.
            reserve: (key, its parent's key or None) of blocks to write, parents first. Each slot
                granted must later be committed or abandoned.
            tenant: Tenant to which the slots are charged, up to 64 bytes; the empty one is a
                tenant like any other.
            compute_block_s: Time to compute one of the acquired blocks, in seconds; 0.0 if it is
                not known: then every block is fetched.
            hold: Number of a hold: no block of these keys is evicted before ``end_hold`` of this
                number, or for five minutes; 0 holds none.
            num_readers: Number of decode legs that each end the hold, from 1 to 65536.
            is_repeated: True if the same request has asked for these keys before, so that the store
                does not count them again.

        Raises:
            ValueError: A key is not of 16 to 64 bytes, there are more than 65536 keys, the tenant
                is too long, or ``compute_block_s`` is out of range.
            FingerprintError: At the first connection only.
        """
        _check_keys(acquire)
        _check_keys([key for pair in reserve for key in pair if key is not None])
        _check_terms(tenant, compute_block_s)
        reach(FailPoint.CLIENT_BEFORE_EXCHANGE)
        with self._lock:
            reply = self._link.call(
                lambda seq: wire.ExchangeSlots(
                    seq,
                    list(acquire),
                    list(reserve),
                    tenant,
                    compute_block_s,
                    hold,
                    num_readers,
                    is_repeated,
                ),
                wire.SlotsGranted,
            )
            generation = self._link.generation
        if reply is None:
            return Exchanged(None, (), (None,) * len(reserve))
        slots = [Slot(index, generation, serial) for index, serial in reply.slots]
        lease = None if reply.lease_id is None else Lease(reply.lease_id, generation)
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
        """Report that the blocks of a hold have been read, or will not be; do not wait.

        Args:
            reader: Number of the decode leg that has ended its part, from 0 on; None for all legs.
            also: ``HOST:PORT`` of the store that has pushed the blocks to this one, whose hold
                ends too; empty for none.
        """
        with self._lock:
            self._link.tell(wire.EndHold(self._link.generation, hold, reader, also))

    def keep(self, keys: Sequence[bytes], keep_s: float) -> None:
        """Request to keep blocks for ``keep_s`` seconds from now, 3600 at most, without waiting.

        The store evicts them earlier only if it is asked to keep more than a share of its slots, or
        of the tenant's, or has no other block to evict.

        Args:
            keys: Keys of a chain from its first block on; those that the store lacks are left out.

        Raises:
            ValueError: A key is not of 16 to 64 bytes, or there are more than 65536 keys.
        """
        _check_keys(keys)
        with self._lock:
            self._link.tell(wire.KeepBlocks(self._link.generation, list(keys), keep_s))

    def arrivals(self, slots: Sequence[Slot]) -> list[Lookup]:
        """Return the states of the leased ``slots``, without a message: under 1 us a slot.

        Returns:
            For each slot HIT if its block is readable, PENDING while the block is on its way, MISS
            if the block will not arrive, its lease has ended, or the store is lost.
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
        """Request that a prompt's blocks are sent to another machine's store, without waiting.

        The layers of blocks that are being written are sent as ``note_written`` reports them, and
        the blocks are readable there soon after their commit. If the store has no such peer, or
        the peer is away, nothing is sent: readers there fetch the blocks once committed.

        Args:
            to: ``HOST:PORT`` of the store, as this store knows its peer.
            keys: Keys of the prompt from its first block on, as acquired and reserved.
            tenant: Tenant to which the slots there are charged.
            hold: Number of a hold under which the peer keeps all of the blocks until ``end_hold``,
                or takes none of them; 0 holds none.
            num_readers: Number of decode legs, see ``exchange``.

        Raises:
            ValueError: A key or the tenant is invalid, see ``exchange``.
        """
        _check_keys(keys)
        _check_terms(tenant, 0.0)
        with self._lock:
            terms = (tenant, hold, num_readers)
            self._link.tell(wire.PushBlocks(self._link.generation, to, list(keys), *terms))

    def note_written(self, slots: Sequence[Slot], num_layers: int, part: int = 0) -> None:
        """Report that ``part`` of the first layers of reserved slots is written, without waiting.

        These layers are not written again.
        """
        serials = [slot.serial for slot in slots]
        if serials:
            with self._lock:
                told = wire.LayersWritten(slots[0].generation, serials, part, num_layers)
                self._link.tell(told)

    def commit(self, slots: Sequence[Slot], part: int = 0) -> bool:
        """Report that ``part`` of reserved slots is written, and wait for the store's answer.

        A slot becomes readable when all parts are committed. If no answer arrives, this part of the
        slots is abandoned.

        Returns:
            True if the store accepted every slot. In either case this part of the slots has
            ended: the caller must not write to it any more.
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

        A slot becomes free when all of its parts have ended. ``part`` is the one that is no longer
        written; None ends all.
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
        """Return the mapped pool. Keep the view while copies to or from it are in flight.

        If the pool mapped here is of another ``generation`` than the caller's slots, the store has
        been restarted: the client reconnects first.

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

    def let_go_if_lost(self) -> bool:
        """Unmap the pool if the store is known to be gone; send no message.

        While a client maps the old pool, its memory is not free for the restarted store.

        Returns:
            True if no pool is mapped now: what else keeps the old one has to let go of it too.
        """
        if self._lock.acquire(blocking=False):
            try:
                self._link.note_if_lost()
            finally:
                self._lock.release()
        return self._view is None

    def stats(self) -> StoreStats | None:
        """Return the store's counters and gauges; None while the store is away."""
        with self._lock:
            reply = self._link.call(wire.GetStats, wire.Stats)
        return None if reply is None else reply.stats

    def clear(self) -> int | None:
        """Drop every block that is not in use, from memory and tiers.

        Returns:
            Number of blocks dropped from memory; None while the store is away.
        """
        with self._lock:
            reply = self._link.call(wire.Clear, wire.Cleared)
        return None if reply is None else reply.num_dropped

    def close(self) -> None:
        """Give back all slots and leases and disconnect for good. No copy may be in flight."""
        with self._lock:
            self._link.close()
            self._unmap()

    def _is_lost(self) -> bool:
        # While another thread calls the store, that call finds out whether the store is lost.
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
