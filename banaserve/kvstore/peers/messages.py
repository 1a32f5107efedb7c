"""Messages between the stores of two machines.

Every message is the body of a ``transport.interface.Message`` over a connection on which both
sides have proved that they know the key; blocks travel beside it, as its tensors. A block is asked
for (``FetchBlock``), or pushed while it is being written: offered, sent range by range, and ended.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from banaserve.errors import ProtocolError
from banaserve.kvstore.tiers.interface import BlockBytes
from banaserve.transport.interface import Message, Tensor

VERSION = 3
MAX_KEYS = 1024
MAX_BLOCK_BYTES = 2**28
MAX_TENANT_BYTES = 64
MAX_READERS = 65536
_MIN_KEY_BYTES, _MAX_KEY_BYTES = 32, 80

BlockKey = Annotated[bytes, msgspec.Meta(min_length=_MIN_KEY_BYTES, max_length=_MAX_KEY_BYTES)]


class _Said(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    pass


class PeerHello(_Said, frozen=True, tag="hello"):
    """First request of a connection."""

    version: Annotated[int, msgspec.Meta(ge=0, le=2**31)]


class AskBlocks(_Said, frozen=True, tag="ask"):
    """Which of these blocks may be fetched; without keys, whether the peer answers."""

    keys: Annotated[list[BlockKey], msgspec.Meta(max_length=MAX_KEYS)]


class FetchBlock(_Said, frozen=True, tag="fetch"):
    """The bytes of a block, which has this many."""

    key: BlockKey
    num_bytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_BLOCK_BYTES)]


_HoldId = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_PushId = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_NumBytes = Annotated[int, msgspec.Meta(ge=1, le=MAX_BLOCK_BYTES)]
_FirstByte = Annotated[int, msgspec.Meta(ge=0, le=MAX_BLOCK_BYTES)]
_Numbers = Annotated[
    list[Annotated[int, msgspec.Meta(ge=0, lt=MAX_KEYS)]], msgspec.Meta(max_length=MAX_KEYS)
]


class OfferPush(_Said, frozen=True, tag="offer"):
    """Blocks of a prompt that are being computed, which are sent as they are written.

    Attributes:
        push_id: Of this connection, not used on it before.
        keys: In the order of their chain; each is the parent of the next.
        first_parent: Of the first key; None where it begins the chain.
        num_bytes: Of each block.
        tenant: Pays for the slots.
        hold: Number under which all of the blocks are kept, or none is taken; 0 keeps none.
        num_readers: Number of decode legs that end the hold.
    """

    push_id: _PushId
    keys: Annotated[list[BlockKey], msgspec.Meta(min_length=1, max_length=MAX_KEYS)]
    first_parent: BlockKey | None
    num_bytes: _NumBytes
    tenant: Annotated[bytes, msgspec.Meta(max_length=MAX_TENANT_BYTES)]
    hold: _HoldId = 0
    num_readers: Annotated[int, msgspec.Meta(ge=1, le=MAX_READERS)] = 1


class PushRange(_Said, frozen=True, tag="range"):
    """The bytes from ``first_byte`` on of some wanted blocks, a tensor each; has no answer.

    Of each block the ranges come in order, without gaps.
    """

    push_id: _PushId
    numbers: _Numbers
    first_byte: _FirstByte


class EndPush(_Said, frozen=True, tag="end"):
    """These blocks may be read, all of them having been sent; those will not come. No answer."""

    push_id: _PushId
    done: _Numbers
    failed: _Numbers


class HoldRead(_Said, frozen=True, tag="read"):
    """A decode leg has the blocks of a hold, or none of them will read it. No answer."""

    hold: _HoldId
    reader: Annotated[int, msgspec.Meta(ge=0, lt=MAX_READERS)] | None


class PeerAlive(_Said, frozen=True, tag="alive"):
    """Nothing is to be sent at the moment; has no answer."""


class PushWanted(_Said, frozen=True, tag="wanted"):
    """Places in ``OfferPush.keys`` of the blocks that are to be sent."""

    numbers: _Numbers


class PeerWelcome(_Said, frozen=True, tag="welcome"):
    version: Annotated[int, msgspec.Meta(ge=0, le=2**31)]


class BlockStates(_Said, frozen=True, tag="states"):
    """A ``Lookup`` in each byte, in the order of the keys."""

    states: Annotated[bytes, msgspec.Meta(max_length=MAX_KEYS)]


class BlockSent(_Said, frozen=True, tag="sent"):
    """It is the message's tensor."""


class BlockMissing(_Said, frozen=True, tag="missing"):
    """It is not there any more, or has another size."""


PeerRequest = (
    PeerHello | AskBlocks | FetchBlock | OfferPush | PushRange | EndPush | HoldRead | PeerAlive
)
PeerReply = PeerWelcome | BlockStates | BlockSent | BlockMissing | PushWanted

_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(PeerRequest)
_replies = msgspec.msgpack.Decoder(PeerReply)


def message_of(said: PeerRequest | PeerReply, *blocks: BlockBytes) -> Message:
    """What carries ``said``, and blocks or parts of them beside it."""
    tensors = tuple(Tensor("uint8", (block.size,), block) for block in blocks)
    return Message(_encoder.encode(said), tensors)


def request_in(body: bytes) -> PeerRequest:
    """What a peer asks.

    Raises:
        ProtocolError: It is no request.
    """
    try:
        return _requests.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"not a request of a store: {error}") from None


def reply_in(message: Message) -> PeerReply:
    """What a peer answers.

    Raises:
        ProtocolError: It is no answer.
    """
    try:
        return _replies.decode(message.body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"not an answer of a store: {error}") from None
