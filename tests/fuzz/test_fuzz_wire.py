"""Messages of the store's socket and of guests: decoded, or a protocol error."""

from __future__ import annotations

import msgspec
import pytest

pytest.importorskip("vllm")

from hypothesis import given

from banaserve.base.errors import ProtocolError
from banaserve.base.net.framing import MessageReader
from banaserve.kvstore import wire
from banaserve.migration.rpc import messages
from banaserve.migration.rpc.tensors import restore
from banaserve.migration.units.registry import decode_request
from corpus import attempt, fuzzed, spoiled


@fuzzed
@given(spoiled("wire"))
def test_a_frame_of_the_store_is_a_message_or_a_protocol_error(data: bytes) -> None:
    for framing in (wire.REQUESTS, wire.REPLIES):
        reader, again = MessageReader(framing), MessageReader(framing)
        reader.feed(data)
        found, error = attempt(lambda: list(iter(reader.take, None)), ProtocolError)  # noqa: B023
        assert str(error).isprintable()
        for message in found or ():
            again.feed(framing.encode(message))
            assert again.take() == message


@fuzzed
@given(spoiled("guest"))
def test_a_guest_s_answer_is_one_or_a_protocol_error(data: bytes) -> None:
    reply, error = attempt(lambda: messages.decode_reply(data), ProtocolError)
    if reply is None:
        assert "no guest's answer" in str(error)
    else:
        assert messages.encode(messages.decode_reply(messages.encode(reply))) == messages.encode(
            reply
        )


@fuzzed
@given(spoiled("guest"))
def test_a_host_s_message_is_one_or_the_documented_error(data: bytes) -> None:
    request, error = attempt(lambda: decode_request(data), msgspec.MsgspecError)
    assert error is not None or isinstance(request, msgspec.Struct)


@fuzzed
@given(spoiled("guest"))
def test_tensors_that_did_not_come_are_a_protocol_error(data: bytes) -> None:
    try:
        packed = msgspec.msgpack.decode(data)
    except (msgspec.MsgspecError, ValueError):
        packed = {"x": [len(data), "numpy"]}
    if not isinstance(packed, dict):
        packed = {"x": packed}
    restored, _ = attempt(lambda: restore(packed, ()), ProtocolError)
    assert all(not isinstance(value, list) for value in (restored or {}).values())
