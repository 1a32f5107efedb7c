"""Frames on byte streams of every kind: whole however split, and refused by their length."""

from __future__ import annotations

import asyncio
import io
import os
import socket
import tracemalloc
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from banaserve.base.errors import ProtocolError
from banaserve.base.net.framing import Framing, MessageReader, receive, receive_async
from corpus import attempt
from depth import num_examples

MAX_BYTES = 1000


class Said(msgspec.Struct, frozen=True, array_like=True):
    number: int
    content: bytes = b""


FRAMING: Framing[Said] = Framing(Said, MAX_BYTES)
said = st.builds(Said, st.integers(0, 2**63), st.binary(max_size=900))


@given(messages=st.lists(said, max_size=5), cuts=st.lists(st.integers(0, 6000)), rest=st.binary())
@settings(max_examples=num_examples(400))
def test_any_split_gives_the_same_messages(
    messages: list[Said], cuts: list[int], rest: bytes
) -> None:
    stream = b"".join(FRAMING.encode(one) for one in messages) + rest[:3]
    ends = sorted(min(cut, len(stream)) for cut in cuts)
    reader, found = MessageReader(FRAMING), []
    for first, end in zip([0, *ends], [*ends, len(stream)], strict=True):
        reader.feed(stream[first:end])
        found += iter(reader.take, None)
    assert found == messages
    assert reader.take() is None


@given(messages=st.lists(said, min_size=1, max_size=4), most=st.integers(1, 50))
@settings(max_examples=num_examples(200))
def test_a_read_of_what_is_missing_leaves_the_rest_in_the_stream(
    messages: list[Said], most: int
) -> None:
    stream = io.BytesIO(b"".join(FRAMING.encode(one) for one in messages))
    for i, message in enumerate(messages):
        # A reader of its own for each message, and reads that return less than was asked for.
        assert receive(lambda n: stream.read(min(n, most)), MessageReader(FRAMING)) == message
        assert stream.tell() == sum(len(FRAMING.encode(one)) for one in messages[: i + 1])
    assert receive(stream.read, MessageReader(FRAMING)) is None


@given(data=st.binary(max_size=64))
@settings(max_examples=num_examples(400))
def test_other_bytes_are_messages_or_one_error(data: bytes) -> None:
    reader = MessageReader(FRAMING)
    reader.feed(FRAMING.encode(Said(7)) + data)
    assert reader.take() == Said(7)
    found, error = attempt(lambda: list(iter(reader.take, None)), ProtocolError)
    assert str(error).isprintable()
    assert all(isinstance(message, Said) for message in found or ())
    assert error is not None or reader.num_missing > 0


@pytest.mark.parametrize(
    "length",
    [MAX_BYTES + 1, 2**31, (-1).to_bytes(4, "little", signed=True)],
    ids=["over the limit", "two gigabytes", "negative"],
)
def test_a_length_over_the_limit_is_refused_before_memory_is_taken(length: int | bytes) -> None:
    reader = MessageReader(FRAMING)
    reader.feed(length if isinstance(length, bytes) else length.to_bytes(4, "little"))
    tracemalloc.start()
    with pytest.raises(ProtocolError, match=f"too large: at most {MAX_BYTES}"):
        reader.take()
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()
    with pytest.raises(ProtocolError, match="too large"):
        FRAMING.encode(Said(1, bytes(MAX_BYTES)))


@pytest.mark.parametrize(
    "body", [b"", b"\x91" * 500, b"\xdd\xff\xff\xff\xff", b"\x92\xa1\xff\xc4\x00", b"\x91\xa1x"]
)
def test_a_body_that_is_no_message_is_a_protocol_error(body: bytes) -> None:
    reader = MessageReader(FRAMING)
    reader.feed(len(body).to_bytes(4, "little") + body)
    with pytest.raises(ProtocolError, match="not a message"):
        reader.take()


def over_socket(stream: bytes) -> list[Said | None]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(stream)
        ours.shutdown(socket.SHUT_WR)
        reader = MessageReader(FRAMING)
        return [receive(theirs.recv, reader) for _ in range(3)]


def over_socket_that_does_not_block(stream: bytes) -> list[Said | None]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        reader, found = MessageReader(FRAMING), []
        for byte in stream:
            with pytest.raises(BlockingIOError):
                theirs.recv(1)
            ours.sendall(bytes([byte]))
            reader.feed(theirs.recv(65536))
            found += iter(reader.take, None)
        return [*found, reader.take()]


def over_pipe(stream: bytes) -> list[Said | None]:
    reading, writing = os.pipe()
    os.write(writing, stream)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        return [receive(pipe.read, MessageReader(FRAMING)) for _ in range(3)]


def over_asyncio(stream: bytes) -> list[Said | None]:
    async def run() -> list[Said | None]:
        arrived = asyncio.StreamReader()
        arrived.feed_data(stream)
        arrived.feed_eof()
        reader = MessageReader(FRAMING)
        return [await receive_async(arrived.read, reader) for _ in range(3)]

    return asyncio.run(run())


@pytest.mark.parametrize(
    "over", [over_socket, over_socket_that_does_not_block, over_pipe, over_asyncio]
)
def test_every_kind_of_stream_gives_the_messages_and_its_end(
    over: Callable[[bytes], list[Said | None]],
) -> None:
    messages = [Said(1, b"x" * 300), Said(2)]
    half = FRAMING.encode(Said(3))[:-1]
    assert over(b"".join(FRAMING.encode(one) for one in messages) + half) == [*messages, None]
