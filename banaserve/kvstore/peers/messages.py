"""Messages between the stores of two machines.

Every message is the body of a ``transport.interface.Message`` over a connection on which both
sides have proved that they know the key; blocks are sent as the message's tensors. A block is
fetched (``FetchBlock``), or pushed while it is being written: offered, sent range by range, ended.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from banaserve.base.net.framing import decode
from banaserve.kvstore.tiers.interface import BlockBytes
from banaserve.kvstore.wire import Number, Reader, Readers, Tenant
from banaserve.transport.interface import Message, Tensor

VERSION = 3
MAX_KEYS = 1024
MAX_BLOCK_BYTES = 2**28
_MIN_KEY_BYTES, _MAX_KEY_BYTES = 32, 80

BlockKey = Annotated[bytes, msgspec.Meta(min_length=_MIN_KEY_BYTES, max_length=_MAX_KEY_BYTES)]


class _Said(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    pass


class PeerHello(_Said, frozen=True, tag="hello"):
    """First request of a connection."""

    version: Annotated[int, msgspec.Meta(ge=0, le=2**31)]


class AskBlocks(_Said, frozen=True, tag="ask"):
    """Question which of these blocks may be fetched; without keys, whether the peer answers."""

    keys: Annotated[list[BlockKey], msgspec.Meta(max_length=MAX_KEYS)]


class FetchBlock(_Said, frozen=True, tag="fetch"):
    """Request for the bytes of a block of ``num_bytes`` bytes."""

    key: BlockKey
    num_bytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_BLOCK_BYTES)]


_NumBytes = Annotated[int, msgspec.Meta(ge=1, le=MAX_BLOCK_BYTES)]
_FirstByte = Annotated[int, msgspec.Meta(ge=0, le=MAX_BLOCK_BYTES)]
_Numbers = Annotated[
    list[Annotated[int, msgspec.Meta(ge=0, lt=MAX_KEYS)]], msgspec.Meta(max_length=MAX_KEYS)
]


class OfferPush(_Said, frozen=True, tag="offer"):
    """Offer of a prompt's blocks that are being computed, which are sent as they are written.

    Attributes:
        push_id: Number of the push, not used on this connection before.
        keys: Keys in the order of their chain; each is the parent of the next.
        first_parent: Parent of the first key; None if that key begins the chain.
        num_bytes: Size of each block.
        hold: Number of a hold, see ``StoreClient.push``.
    """

    push_id: Number
    keys: Annotated[list[BlockKey], msgspec.Meta(min_length=1, max_length=MAX_KEYS)]
    first_parent: BlockKey | None
    num_bytes: _NumBytes
    tenant: Tenant
    hold: Number = 0
    num_readers: Readers = 1


class PushRange(_Said, frozen=True, tag="range"):
    """Bytes from ``first_byte`` on of some wanted blocks, one tensor for each block; no answer.

    The ranges of each block are sent in order, without gaps.
    """

    push_id: Number
    numbers: _Numbers
    first_byte: _FirstByte


class EndPush(_Said, frozen=True, tag="end"):
    """End of blocks: ``done`` are sent and may be read, ``failed`` will not arrive. No answer."""

    push_id: Number
    done: _Numbers
    failed: _Numbers


class HoldRead(_Said, frozen=True, tag="read"):
    """End of a hold for a decode leg, or for all legs if ``reader`` is None. No answer."""

    hold: Number
    reader: Reader | None


class PeerAlive(_Said, frozen=True, tag="alive"):
    """Sign of life of a peer that has nothing to send at the moment; no answer."""


class PushWanted(_Said, frozen=True, tag="wanted"):
    """Positions in ``OfferPush.keys`` of the blocks that are to be sent."""

    numbers: _Numbers


class PeerWelcome(_Said, frozen=True, tag="welcome"):
    version: Annotated[int, msgspec.Meta(ge=0, le=2**31)]


class BlockStates(_Said, frozen=True, tag="states"):
    """States of the keys, in their order: a ``Lookup`` in each byte."""

    states: Annotated[bytes, msgspec.Meta(max_length=MAX_KEYS)]


class BlockSent(_Said, frozen=True, tag="sent"):
    """Answer with the block as the message's tensor."""


class BlockMissing(_Said, frozen=True, tag="missing"):
    """Answer that the block is gone, or has another size."""


PeerRequest = (
    PeerHello | AskBlocks | FetchBlock | OfferPush | PushRange | EndPush | HoldRead | PeerAlive
)
PeerReply = PeerWelcome | BlockStates | BlockSent | BlockMissing | PushWanted

_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[PeerRequest] = msgspec.msgpack.Decoder(PeerRequest)
_replies: msgspec.msgpack.Decoder[PeerReply] = msgspec.msgpack.Decoder(PeerReply)


def message_of(said: PeerRequest | PeerReply, *blocks: BlockBytes) -> Message:
    """Return the message with ``said`` as its body, and blocks or parts of them as its tensors."""
    tensors = tuple(Tensor("uint8", (block.size,), block) for block in blocks)
    return Message(_encoder.encode(said), tensors)


def request_in(body: bytes) -> PeerRequest:
    """Decode a peer's request; raise ProtocolError if the body is none."""
    return decode(_requests, body)


def reply_in(message: Message) -> PeerReply:
    """Decode a peer's answer; raise ProtocolError if the body is none."""
    return decode(_replies, message.body)
