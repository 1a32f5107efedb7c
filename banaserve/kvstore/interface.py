"""Values that the KV cache store gives its clients. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import msgspec


class Lookup(IntEnum):
    """State of a key in the store.

    PENDING: its block is on its way. ASKED: a tier is asking others for it: look again soon.
    """

    MISS = 0
    HIT = 1
    PENDING = 2
    ASKED = 3


class Slot(msgspec.Struct, frozen=True, array_like=True):
    """One block's place in the pool, as one use of that place.

    ``serial`` tells apart the successive uses of one index, so that a late commit of an abandoned
    reservation cannot publish what another client is writing there now.

    Attributes:
        index: Which slot of the pool: its bytes begin at ``index * slot_bytes``.
        generation: The pool's generation; a slot of another generation means nothing.
        serial: Unique for each reservation within a generation.
    """

    index: int
    generation: int
    serial: int


class Lease(msgspec.Struct, frozen=True, array_like=True):
    """The right to read a run of blocks: none of them is evicted before its release."""

    id: int
    generation: int
    num_slots: int


@dataclass(frozen=True, slots=True)
class Exchanged:
    """The outcome of ``StoreClient.exchange``.

    Attributes:
        lease: Covers ``slots``; None where the store has nothing of the first key asked for.
        slots: Where the blocks of the longest prefix of the acquired keys lie that are readable
            or on their way up from a tier, in their order.
        reserved: One entry for each reserved key; None where it is present already, is being
            written by another, or there is no room.
        num_ready: Of ``slots``, so many at the front are readable. For the others ask
            ``StoreClient.arrivals``.
        wait_s: Predicted seconds until the last of ``slots`` is readable; 0.0 where all are.
        undecided: A tier is still asking a peer about the key after ``slots``: ask again soon.
        num_declined: Blocks after ``slots`` that lie in a tier and were left there because
            computing them is predicted to be cheaper than fetching them.
        num_refused: Number of reserved keys that have no slot for lack of room, not by a quota.
        num_unfetched: Number of acquired keys whose blocks lie in a tier and found no slot, for
            lack of room or because as many as may be are on their way up.
        num_held: Number of the store's blocks that are held until decode has read them.
    """

    lease: Lease | None
    slots: Sequence[Slot]
    reserved: Sequence[Slot | None]
    num_ready: int = 0
    wait_s: float = 0.0
    undecided: bool = False
    num_declined: int = 0
    num_refused: int = 0
    num_held: int = 0
    num_unfetched: int = 0
