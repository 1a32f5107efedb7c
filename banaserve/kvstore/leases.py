"""Values that the KV cache store returns to its clients. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import msgspec


class Lookup(IntEnum):
    """State of a key in the store.

    PENDING: its block is on its way. ASKED: a tier is asking its peers for the block: look up the
    key again soon.
    """

    MISS = 0
    HIT = 1
    PENDING = 2
    ASKED = 3


class Slot(msgspec.Struct, frozen=True, array_like=True):
    """Place of a block in the pool, as one use of that place.

    ``serial`` distinguishes the successive uses of one index, so that a late commit of an abandoned
    reservation cannot publish the bytes that another client is writing to that place now.

    Attributes:
        index: Number of the slot in the pool: its bytes begin at ``index * slot_bytes``.
        generation: The pool's generation; a slot of another generation means nothing.
        serial: Number of the reservation, unique within a generation.
    """

    index: int
    generation: int
    serial: int


class Lease(msgspec.Struct, frozen=True, array_like=True):
    """Right to read a run of blocks: none of them is evicted before the lease's release."""

    id: int
    generation: int


@dataclass(frozen=True, slots=True)
class Exchanged:
    """Outcome of ``StoreClient.exchange``.

    Attributes:
        lease: Lease of ``slots``; None if the store has no block of the first acquired key.
        slots: Slots of the longest prefix of the acquired keys whose blocks are readable or on
            their way from a tier, in the order of the keys.
        reserved: Slots of the reserved keys, in their order; None for a key that is present
            already or is being written by another client, or if there is no room.
        num_ready: Number of ``slots`` at the front that are readable. For the others call
            ``StoreClient.arrivals``.
        wait_s: Predicted seconds until the last of ``slots`` is readable; 0.0 if all are.
        undecided: True if a tier is still asking a peer about the key after ``slots``: exchange
            again soon.
        num_declined: Number of blocks after ``slots`` that are in a tier and were left there
            because computing them is predicted to be cheaper than fetching them.
        num_refused: Number of reserved keys that have no slot for lack of room, not by a quota.
        num_unfetched: Number of acquired keys whose blocks are in a tier and found no slot, for
            lack of room or because the maximum number of promotions is under way.
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
