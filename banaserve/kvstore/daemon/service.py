"""Replies of the daemon to each message, without sockets and processes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from banaserve.base.errors import ProtocolError, UserError
from banaserve.kvstore import wire
from banaserve.kvstore.daemon.carved_pool import CarvedPool
from banaserve.kvstore.daemon.pushes.pushing import Pushing
from banaserve.kvstore.daemon.pushes.receiving import Receiving
from banaserve.kvstore.daemon.tiering.promoter import PromotionRequest, PromotionResult
from banaserve.kvstore.daemon.tiering.tiering import Tiering
from banaserve.kvstore.fingerprint import Fingerprint
from banaserve.kvstore.index.index import BlockIndex
from banaserve.kvstore.index.records import HOLD_S, IndexEntry
from banaserve.kvstore.sizes import format_size
from banaserve.kvstore.stats import StoreStats
from banaserve.kvstore.tiers.interface import BlockBytes

log = logging.getLogger(__name__)

SETTLE_S = 5.0
"""Maximum wait for copies under way before the pool is cut into other slots, in seconds."""


@dataclass(frozen=True, slots=True)
class Session:
    """Connection that has sent Hello. Its id owns leases and reservations in the index.

    Attributes:
        num_writers: Number of processes that each write their share of the session's slots.
    """

    id: int
    client_name: str
    fingerprint: Fingerprint | None
    namespace: bytes
    num_writers: int = 1


class StoreService:
    """Index of the current pool and the clients that share it.

    Args:
        carved: Pool of the blocks, which this service cuts.
        tiering: Tiers below the pool.
        pushing: Pushes to other machines' stores.
        set_peers: Function that sets the addresses of the stores from which blocks are fetched;
            raises UserError if an address is invalid, or the store shares no blocks.
        clock: Monotonic clock, in seconds.
    """

    def __init__(
        self,
        carved: CarvedPool,
        tiering: Tiering,
        pushing: Pushing,
        set_peers: Callable[[Sequence[str]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self.receiving = Receiving(carved, tiering.promoter, clock)
        self._pushing = pushing
        self.pool_bytes = carved.pool.num_bytes
        self.num_protocol_errors = 0
        self._carved = carved
        self._tiering = tiering
        self._set_peers = set_peers
        self._sessions: dict[int, Session] = {}
        self._quarantined_ids: set[int] = set()
        self._num_refused = 0
        self._num_layout_mismatches = 0
        self._num_loans = 0
        self._num_lent = self._lent_bytes = 0

    @property
    def index(self) -> BlockIndex:
        """Index of the pool as it is cut at present."""
        return self._carved.index

    def greet(self, session_id: int, hello: wire.ClientHello) -> wire.Welcome | wire.ClientRefused:
        """Accept or refuse a connection; an accepted one has a session until ``leave``.

        Raises:
            ProtocolError: The connection has a session already.
        """
        if session_id in self._sessions:
            raise ProtocolError("a second Hello")
        if hello.version != wire.PROTOCOL_VERSION:
            message = (
                f"the store speaks protocol version {wire.PROTOCOL_VERSION}, "
                f"{hello.client_name} speaks {hello.version}: install the same banaserve for both"
            )
            return wire.ClientRefused(hello.seq, False, message)
        namespace, num_writers = b"", 1
        if hello.fingerprint is not None:
            refusal = self._refusal(hello.client_name, hello.fingerprint)
            if refusal is not None:
                self._num_refused += 1
                log.error("refused: %s", refusal)
                return wire.ClientRefused(hello.seq, True, refusal)
            if not self._carve(hello.fingerprint.slot_bytes):
                message = "blocks of another size are still being copied: try again later"
                return wire.ClientRefused(hello.seq, False, message)
            self._note_layout_mismatch(hello.client_name, hello.fingerprint)
            namespace = hello.fingerprint.namespace()
            num_writers = hello.num_writers or hello.fingerprint.num_parts
        session = Session(session_id, hello.client_name, hello.fingerprint, namespace, num_writers)
        self._sessions[session_id] = session
        return wire.Welcome(
            hello.seq, self._carved.generation, self.pool_bytes, self._carved.slot_bytes
        )

    def answer(self, session_id: int, request: wire.Request) -> wire.Reply | None:
        """Execute a request and return its reply; None if the request has no reply.

        Raises:
            ProtocolError: The session may not send this request.
        """
        session = self._sessions.get(session_id)
        if session is None:
            raise ProtocolError("a request before Hello")
        match request:
            case wire.GetStats():
                return wire.Stats(request.seq, self.stats())
            case wire.Clear():
                from_tiers = sum(tier.clear() for tier in self._tiering.tiers)
                return wire.Cleared(request.seq, self.index.clear(), from_tiers)
            case wire.SetPeers():
                return wire.PeersSet(request.seq, self._peers_problem(request.peers))
        if session.fingerprint is None:
            raise ProtocolError("a request for blocks without a fingerprint")
        match request:
            case wire.LookupKeys():
                keys = [session.namespace + key for key in request.keys]
                states = self.index.lookup(keys)
                self._tiering.promoter.lookup(keys, states)
                return wire.LookupStates(request.seq, bytes(states))
            case wire.ExchangeSlots():
                return self._exchange(session, request)
            case wire.PushBlocks() if request.generation == self._carved.generation:
                self._push(session, session.fingerprint, request)
            case wire.LayersWritten() if request.generation == self._carved.generation:
                self._pushing.written(request.serials, request.part, request.num_layers)
            case wire.Commit():
                return wire.Committed(request.seq, self._commit(request))
            case wire.Abandon() if request.generation == self._carved.generation:
                for serial in request.serials:
                    self.index.abandon(serial, request.part)
            case wire.ReleaseLeases() if request.generation == self._carved.generation:
                self.index.release(request.lease_id)
            case wire.KeepBlocks() if request.generation == self._carved.generation:
                keys = [session.namespace + key for key in request.keys]
                self.index.keep(keys, self._clock() + request.keep_s)
            case wire.EndHold() if request.generation == self._carved.generation:
                self.index.end_hold(request.hold, request.reader)
                if request.also:
                    self._pushing.end_hold(request.also, request.hold, request.reader)
        return None

    def _peers_problem(self, peers: Sequence[str]) -> str:
        """Set the peers; return the reason in one line if that fails, else an empty text."""
        try:
            self._set_peers(peers)
        except UserError as error:
            return str(error)
        return ""

    # ---- stores of other machines, whose keys include the namespace

    def lend(self, key: bytes, num_bytes: int) -> tuple[IndexEntry, BlockBytes] | None:
        """Pin a block until ``take_back``, and return it with its memory, ``[num_bytes]``.

        None if there is no such block of ``num_bytes``.
        """
        entry = self.index.get(key)
        if num_bytes != self._carved.slot_bytes:
            return None
        if entry is None or not entry.ready or not self.index.verify(entry):
            return None
        self.index.pin(entry)
        self._num_loans += 1
        return entry, self._carved.bytes_of(entry)

    def take_back(self, entry: IndexEntry) -> None:
        """Unpin a lent block."""
        self._num_loans -= 1
        self._num_lent += 1
        self._lent_bytes += self._carved.slot_bytes
        self.index.unpin(entry)

    def leave(self, session_id: int) -> str | None:
        """Forget a connection that is gone. Its leases and reservations stay until ``drop``.

        Returns:
            Name of the client if the session still holds a lease or a reservation, else None.
        """
        session = self._sessions.pop(session_id, None)
        if session is None or not self.index.owns_any(session_id):
            return None
        self._quarantined_ids.add(session_id)
        return session.client_name

    def drop(self, session_id: int) -> None:
        """Take back a session's leases and reservations; its processes no longer use slots."""
        self._quarantined_ids.discard(session_id)
        self.index.drop_owner(session_id)

    def sessions_named(self, client_name: str) -> list[int]:
        """Return the ids of the connected sessions of one client."""
        sessions = self._sessions.values()
        return [session.id for session in sessions if session.client_name == client_name]

    def stats(self) -> StoreStats:
        """Return the current counters and gauges."""
        of_index = self.index.stats()
        quarantined = sum(self.index.num_writing_of(owner) for owner in self._quarantined_ids)
        return StoreStats(
            generation=self._carved.generation,
            capacity_bytes=self.pool_bytes,
            used_bytes=of_index.used_slots * self._carved.slot_bytes,
            slot_bytes=self._carved.slot_bytes,
            quarantined_slots=quarantined,
            joined=self._tiering.promoter.num_joined,
            corrupt_blocks=self._carved.num_corrupt,
            clients=len(self._peers()),
            refused_clients=self._num_refused,
            layout_mismatches=self._num_layout_mismatches,
            protocol_errors=self.num_protocol_errors,
            lent_blocks=self._num_lent,
            lent_bytes=self._lent_bytes,
            pushed_blocks=self._pushing.num_blocks,
            pushed_by_layer_blocks=self._pushing.num_by_layer,
            received_blocks=self.receiving.num_blocks,
            tiers=tuple(tier.report() for tier in self._tiering.tiers),
            **msgspec.structs.asdict(of_index),
        )

    def _peers(self) -> list[tuple[str, Fingerprint]]:
        return [
            (session.client_name, session.fingerprint)
            for session in self._sessions.values()
            if session.fingerprint is not None
        ]

    def _refusal(self, client_name: str, fingerprint: Fingerprint) -> str | None:
        if fingerprint.slot_bytes > self.pool_bytes:
            return (
                f"one block of {client_name} takes {format_size(fingerprint.slot_bytes)} and the "
                f"pool has {format_size(self.pool_bytes)}: give a larger --kv-store-size (of "
                "`banaserve kvstore`: --size)"
            )
        for other_name, other in self._peers():
            if fingerprint.differing_fields(other) == ("probe",):
                return (
                    f"{client_name} and {other_name} agree in everything but probe: they hash the "
                    "same tokens differently and would never find each other's blocks. Start both "
                    "with the same PYTHONHASHSEED and prefix caching hash algorithm"
                )
        in_use = bool(self._peers()) or self.index.has_owners
        if in_use and fingerprint.slot_bytes != self._carved.slot_bytes:
            return (
                f"{client_name} has blocks of {fingerprint.slot_bytes} bytes and the clients of "
                f"this store have blocks of {self._carved.slot_bytes}: give it a store of its own"
            )
        return None

    def _note_layout_mismatch(self, client_name: str, fingerprint: Fingerprint) -> None:
        for other_name, other in self._peers():
            if fingerprint != other and fingerprint.same_identity(other):
                self._num_layout_mismatches += 1
                fields = ", ".join(fingerprint.differing_fields(other))
                log.warning(
                    "%s and %s serve the same model but differ in %s: neither sees the other's "
                    "blocks", client_name, other_name, fields,
                )  # fmt: skip
                return

    def _carve(self, slot_bytes: int) -> bool:
        """Cut the pool into slots of ``slot_bytes``; False if the pool is in use."""
        if slot_bytes == self._carved.slot_bytes:
            return True
        if self._num_loans or self._pushing.is_busy or self.receiving.is_busy:
            return False
        if not self._tiering.settle(SETTLE_S):
            return False
        self._carved.carve(slot_bytes)
        return True

    def _exchange(self, session: Session, request: wire.ExchangeSlots) -> wire.SlotsGranted:
        namespace = session.namespace
        keys = [namespace + key for key in request.acquire]
        self.index.expire(self._clock())
        promotion = self._acquire(keys, session, request)
        grant = promotion.grant
        if not (request.is_repeated or promotion.undecided):
            self.index.count_asked(keys, 0 if grant is None else len(grant.entries))
        to_write = [namespace + key for key, _ in request.reserve]
        # Hold once before the reservations, so that these do not evict blocks of the same prompt.
        self._hold(request, (*keys, *to_write))
        reserved = [
            self.index.reserve(
                key,
                None if parent is None else namespace + parent,
                session.id,
                session.num_writers,
                request.tenant,
            )
            for key, (_, parent) in zip(to_write, request.reserve, strict=True)
        ]
        self._hold(request, to_write)
        num_refused = 0
        if not self.index.is_at_quota(request.tenant):
            lacking = (key for key, one in zip(to_write, reserved, strict=True) if one is None)
            num_refused = sum(self.index.get(key) is None for key in lacking)
        return wire.SlotsGranted(
            request.seq,
            None if grant is None else grant.lease_id,
            [] if grant is None else grant.slots,
            reserved,
            0 if grant is None else grant.num_ready,
            promotion.wait_s,
            promotion.undecided,
            promotion.num_declined,
            num_refused,
            request.hold,
            self.index.num_held,
            promotion.num_unfetched,
        )

    def _hold(self, request: wire.ExchangeSlots, keys: Sequence[bytes]) -> None:
        if request.hold:
            until_s = self._clock() + HOLD_S
            self.index.hold(request.hold, keys, until_s, request.num_readers)

    def _acquire(
        self, keys: list[bytes], session: Session, request: wire.ExchangeSlots
    ) -> PromotionResult:
        parent = None
        if keys and self._tiering.tiers:
            # The first key's parent is not among the keys, but may be among those to write.
            parent = dict(request.reserve).get(request.acquire[0])
        first_parent = parent and session.namespace + parent
        wanted = PromotionRequest(
            keys, first_parent, session.id, request.tenant, request.compute_block_s
        )
        return self._tiering.promoter.promote(wanted)

    def _push(self, session: Session, fingerprint: Fingerprint, request: wire.PushBlocks) -> None:
        keys = [session.namespace + key for key in request.keys]
        if not self._pushing.begin(request, keys, fingerprint):
            log.warning("%s pushes to %s, which is no peer", session.client_name, request.to)

    def _commit(self, request: wire.Commit) -> bool:
        if request.generation != self._carved.generation:
            return False
        accepted = [self.index.commit(serial, request.part) for serial in request.serials]
        return all(accepted)
