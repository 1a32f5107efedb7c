"""Messages between the stores of two machines.

Every message is the body of a ``transport.interface.Message`` over a connection on which both
sides have proved that they know the key; a block travels beside it, as its only tensor.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from banaserve.errors import ProtocolError
from banaserve.kvstore.tiers.interface import BlockBytes
from banaserve.transport.interface import Message, Tensor

VERSION = 1
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
    """Which of these blocks may be fetched; without keys, whether the peer answers."""

    keys: Annotated[list[BlockKey], msgspec.Meta(max_length=MAX_KEYS)]


class FetchBlock(_Said, frozen=True, tag="fetch"):
    """The bytes of a block, which has this many."""

    key: BlockKey
    num_bytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_BLOCK_BYTES)]


class PeerWelcome(_Said, frozen=True, tag="welcome"):
    version: Annotated[int, msgspec.Meta(ge=0, le=2**31)]


class BlockStates(_Said, frozen=True, tag="states"):
    """A ``Lookup`` in each byte, in the order of the keys."""

    states: Annotated[bytes, msgspec.Meta(max_length=MAX_KEYS)]


class BlockSent(_Said, frozen=True, tag="sent"):
    """It is the message's tensor."""


class BlockMissing(_Said, frozen=True, tag="missing"):
    """It is not there any more, or has another size."""


PeerRequest = PeerHello | AskBlocks | FetchBlock
PeerReply = PeerWelcome | BlockStates | BlockSent | BlockMissing

_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(PeerRequest)
_replies = msgspec.msgpack.Decoder(PeerReply)


def message_of(said: PeerRequest | PeerReply, block: BlockBytes | None = None) -> Message:
    """What carries ``said``, and a block beside it."""
    tensors = () if block is None else (Tensor("uint8", (block.size,), block),)
    return Message(_encoder.encode(said), tensors)


def request_in(message: Message) -> PeerRequest:
    """What a peer asks.

    Raises:
        ProtocolError: It is no request.
    """
    try:
        return _requests.decode(message.body)
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
