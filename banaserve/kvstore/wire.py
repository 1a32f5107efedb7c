"""Protocol of the store's socket: frames of ``base/net/framing.py``, checked on arrival.

Either side closes a connection on which anything else arrives. Requests that have a ``seq`` are
answered in order, with that ``seq``; the others are not answered.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from banaserve.base.net.framing import Framing
from banaserve.kvstore.fingerprint import MAX_PARTS, Fingerprint
from banaserve.kvstore.stats import StoreStats

PROTOCOL_VERSION = 7
MAX_MESSAGE_BYTES = 16 * 2**20
MAX_KEYS = 65536
MIN_KEY_BYTES = 16
MAX_KEY_BYTES = 64
MAX_TENANT_BYTES = 64
MAX_COMPUTE_BLOCK_S = 1e6
MAX_PEERS = 1024
MAX_READERS = 65536
MAX_KEEP_S = 3600.0
_MAX_INT = 2**63 - 1

Key = Annotated[bytes, msgspec.Meta(min_length=MIN_KEY_BYTES, max_length=MAX_KEY_BYTES)]
Keys = Annotated[list[Key], msgspec.Meta(max_length=MAX_KEYS)]
Number = Annotated[int, msgspec.Meta(ge=0, le=_MAX_INT)]
Serials = Annotated[list[Number], msgspec.Meta(max_length=MAX_KEYS)]
Part = Annotated[int, msgspec.Meta(ge=0, lt=MAX_PARTS)]
Tenant = Annotated[bytes, msgspec.Meta(max_length=MAX_TENANT_BYTES)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=MAX_COMPUTE_BLOCK_S)]
KeepSeconds = Annotated[float, msgspec.Meta(ge=0.0, le=MAX_KEEP_S)]
Readers = Annotated[int, msgspec.Meta(ge=1, le=MAX_READERS)]
Reader = Annotated[int, msgspec.Meta(ge=0, lt=MAX_READERS)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Address = Annotated[str, msgspec.Meta(max_length=256)]


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class ClientHello(_Message, frozen=True, tag="hello"):
    """First message of a connection. Without a fingerprint it is an operator's, without blocks.

    ``num_writers`` processes each write their share of every slot that this client reserves; 0
    means one process for each part of the fingerprint.
    """

    seq: Number
    version: Number
    client_name: Name
    fingerprint: Fingerprint | None
    num_writers: Annotated[int, msgspec.Meta(ge=0, le=MAX_PARTS)] = 0


class LookupKeys(_Message, frozen=True, tag="lookup"):
    seq: Number
    keys: Keys


class ExchangeSlots(_Message, frozen=True, tag="exchange"):
    """Request to lease and reserve slots, see ``StoreClient.exchange``.

    ``reserve`` is a list of (key, its parent's key). 0 is no ``hold``. The store does not count the
    keys of a request that ``is_repeated``.
    """

    seq: Number
    acquire: Keys
    reserve: Annotated[list[tuple[Key, Key | None]], msgspec.Meta(max_length=MAX_KEYS)]
    tenant: Tenant = b""
    compute_block_s: Seconds = 0.0
    hold: Number = 0
    num_readers: Readers = 1
    is_repeated: bool = False


class PushBlocks(_Message, frozen=True, tag="push"):
    """Order to send a prompt's blocks to the store ``to``, see ``StoreClient.push``."""

    generation: Number
    to: Name
    keys: Keys
    tenant: Tenant = b""
    hold: Number = 0
    num_readers: Readers = 1


class LayersWritten(_Message, frozen=True, tag="written"):
    """Note that ``part`` of the first ``num_layers`` layers is written, so they may be copied."""

    generation: Number
    serials: Serials
    part: Part
    num_layers: Number


class Commit(_Message, frozen=True, tag="commit"):
    seq: Number
    generation: Number
    serials: Serials
    part: Part


class Abandon(_Message, frozen=True, tag="abandon"):
    generation: Number
    serials: Serials
    part: Part | None


class ReleaseLeases(_Message, frozen=True, tag="release"):
    generation: Number
    lease_id: Number


class EndHold(_Message, frozen=True, tag="unhold"):
    """End of a hold, see ``StoreClient.end_hold``."""

    generation: Number
    hold: Number
    reader: Reader | None = None
    also: Address = ""


class KeepBlocks(_Message, frozen=True, tag="keep"):
    """Request to keep blocks for a time, see ``StoreClient.keep``."""

    generation: Number
    keys: Keys
    keep_s: KeepSeconds


class GetStats(_Message, frozen=True, tag="stats"):
    seq: Number


class Clear(_Message, frozen=True, tag="clear"):
    seq: Number


class SetPeers(_Message, frozen=True, tag="peers"):
    """Order to fetch blocks from the stores at these ``HOST:PORT`` from now on, and no others."""

    seq: Number
    peers: Annotated[list[Name], msgspec.Meta(max_length=MAX_PEERS)]


class Goodbye(_Message, frozen=True, tag="goodbye"):
    """End of a client that reads and writes no slot any more: its slots may be taken back."""


class Welcome(_Message, frozen=True, tag="welcome"):
    """Answer to Hello, with file descriptors of pool and board if the client has a fingerprint."""

    seq: Number
    generation: Number
    pool_bytes: Number
    slot_bytes: Number


class ClientRefused(_Message, frozen=True, tag="refused"):
    """Answer to a Hello that the store does not accept; the connection ends after it."""

    seq: Number
    because_of_fingerprint: bool
    message: str


class LookupStates(_Message, frozen=True, tag="looked"):
    """States of the keys: the value of a ``Lookup`` in each byte."""

    seq: Number
    states: bytes


class SlotsGranted(_Message, frozen=True, tag="granted"):
    """Answer to ``ExchangeSlots``; see ``Exchanged``.

    ``slots`` and ``reserved`` contain (index, serial); ``hold`` is the request's.
    """

    seq: Number
    lease_id: Number | None
    slots: list[tuple[Number, Number]]
    reserved: list[tuple[Number, Number] | None]
    num_ready: Number = 0
    wait_s: float = 0.0
    undecided: bool = False
    num_declined: Number = 0
    num_refused: Number = 0
    hold: Number = 0
    num_held: Number = 0
    num_unfetched: Number = 0


class Committed(_Message, frozen=True, tag="committed"):
    """Answer whether every slot of the request was accepted."""

    seq: Number
    all_accepted: bool


class Stats(_Message, frozen=True, tag="stats"):
    seq: Number
    stats: StoreStats


class Cleared(_Message, frozen=True, tag="cleared"):
    """Numbers of blocks dropped from memory and from tiers; a block in both counts twice."""

    seq: Number
    num_dropped: Number
    num_dropped_from_tiers: Number


class PeersSet(_Message, frozen=True, tag="peers"):
    """Answer to ``SetPeers``; ``problem`` says why the peers were not set, empty if they were."""

    seq: Number
    problem: str


Request = (
    ClientHello
    | LookupKeys
    | ExchangeSlots
    | PushBlocks
    | LayersWritten
    | Commit
    | Abandon
    | ReleaseLeases
    | EndHold
    | KeepBlocks
    | GetStats
    | Clear
    | SetPeers
    | Goodbye
)
Reply = (
    Welcome | ClientRefused | LookupStates | SlotsGranted | Committed | Stats | Cleared | PeersSet
)

OneWay = PushBlocks | LayersWritten | Abandon | ReleaseLeases | EndHold | KeepBlocks
"""Requests without an answer that name a generation."""

REQUESTS: Framing[Request] = Framing(Request, MAX_MESSAGE_BYTES)
REPLIES: Framing[Reply] = Framing(Reply, MAX_MESSAGE_BYTES)
