"""Where an answer ends: however the bytes are cut, and whatever is wrong with them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from banaserve.base.errors import ProtocolError
from banaserve_route.balancer.http.response import (
    ChunkDecoder,
    ChunkedBody,
    LengthBody,
    UntilClose,
    parse_response_head,
)


def head(*fields, status="200 OK", version="1.1"):
    lines = [f"HTTP/{version} {status}", *fields, "", ""]
    return "\r\n".join(lines).encode()


def cut_at(data, cuts):
    at = 0
    for end in sorted({min(cut, len(data)) for cut in cuts} | {len(data)}):
        yield data[at:end]
        at = end


def feed_in_pieces(body, data, cuts):
    """Returns how many bytes were the body's."""
    used = 0
    for piece in cut_at(data, cuts):
        if piece and not body.is_done:
            used += body.feed(piece)
    return used


@given(
    chunks=st.lists(st.binary(min_size=1, max_size=40), max_size=6),
    trailers=st.sampled_from([b"", b"X-A: 1\r\n", b"X-A: 1\r\nX-B:2\r\n"]),
    after=st.binary(max_size=10),
    cuts=st.lists(st.integers(0, 300), max_size=12),
)
def test_a_chunked_body_ends_where_it_ends_however_it_is_cut(chunks, trailers, after, cuts):
    framed = b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in chunks) + b"0\r\n"
    framed += trailers + b"\r\n"
    body = ChunkedBody()
    assert feed_in_pieces(body, framed + after, cuts) == len(framed)
    assert body.is_done
    decoder = ChunkDecoder()
    assert b"".join(map(decoder.decode, cut_at(framed, cuts))) == b"".join(chunks)


@given(data=st.binary(max_size=60), cuts=st.lists(st.integers(0, 60), max_size=6))
def test_a_body_never_takes_more_than_it_was_given(data, cuts):
    body = ChunkedBody()
    try:
        assert 0 <= feed_in_pieces(body, data, cuts) <= len(data)
    except ProtocolError:
        return


@pytest.mark.parametrize("every", [1, 2, 3, 100])
@pytest.mark.parametrize(
    "framed",
    [
        b"x\r\n",
        b"-1\r\na\r\n",
        b"+1\r\na\r\n",
        b"0x1\r\na\r\n",
        b"1_0\r\n0123456789abcdef\r\n",
        b" 1\r\na\r\n",
        b"1 \r\na\r\n",
        b"1;name=value\r\na\r\n",
        b"1\na\r\n",
        b"1\r\nab\r\n",
        b"1\r\na\r\r\n",
        b"2\r\nab\nX",
        b"\r\n",
        b"fffffffffffffffffff\r\n",
    ],
)
def test_a_bad_chunk_is_refused_however_it_is_cut(framed, every):
    with pytest.raises(ProtocolError):
        feed_in_pieces(ChunkedBody(), framed, range(0, 100, every))


def test_a_chunked_body_knows_where_something_may_be_put_in():
    body = ChunkedBody()
    seen = []
    for piece in (b"2\r\nab\r\n", b"3\r", b"\nab", b"c\r", b"\n", b"0\r\n\r\n"):
        body.feed(piece)
        seen.append(body.at_boundary)
    assert seen == [True, False, False, False, True, False]


def test_a_length_is_counted_over_pieces():
    body = LengthBody(5)
    assert (body.feed(b"abc"), body.is_done) == (3, False)
    assert (body.feed(b"defg"), body.is_done) == (2, True)


@pytest.mark.parametrize(
    ("fields", "kind", "keep_alive"),
    [
        (["Content-Length: 3"], LengthBody, True),
        (["Transfer-Encoding: chunked"], ChunkedBody, True),
        (["transfer-encoding: Chunked", "Connection: close"], ChunkedBody, False),
        ([], UntilClose, False),
    ],
)
def test_the_head_says_how_long_the_body_is(fields, kind, keep_alive):
    parsed = parse_response_head(head(*fields))
    assert isinstance(parsed.body, kind)
    assert parsed.keep_alive is keep_alive


@pytest.mark.parametrize("status", ["204 No Content", "304 Not Modified"])
def test_some_answers_have_no_body(status):
    assert parse_response_head(head("Content-Length: 3", status=status)).body.is_done


def test_an_answer_to_head_has_no_body():
    parsed = parse_response_head(head("Content-Length: 3"), to_head=True)
    assert parsed.body.is_done
    assert b"Content-Length: 3\r\n" in parsed.lines


def test_a_server_of_http_10_closes_unless_it_says_otherwise():
    assert not parse_response_head(head("Content-Length: 1", version="1.0")).keep_alive
    kept = head("Content-Length: 1", "Connection: keep-alive", version="1.0")
    assert parse_response_head(kept).keep_alive


def test_fields_about_the_connection_stay_behind():
    parsed = parse_response_head(
        head("A: 1", "Keep-Alive: timeout=5", "Content-Length: 0", "Connection: x-b", "X-B: 2")
    )
    assert parsed.lines == b"HTTP/1.1 200 OK\r\nA: 1\r\nContent-Length: 0\r\n"


@pytest.mark.parametrize(
    "wrong",
    [
        b"HTTP/2 200 OK\r\n\r\n",
        b"HTTP/1.1 99 OK\r\n\r\n",
        b"HTTP/1.1 2000 OK\r\n\r\n",
        b"SSH-2.0-OpenSSH\r\n\r\n",
        head("Content-Length: 3", "Content-Length: 3"),
        head("Content-Length: 3", "Transfer-Encoding: chunked"),
        head("Content-Length: -3"),
        head("Content-Length: 3, 3"),
        head("Content-Length: 0x3"),
        head("Transfer-Encoding: gzip, chunked"),
        head("Transfer-Encoding: chunked", "Transfer-Encoding: chunked"),
        head("A: 1", " folded"),
        head("A : 1"),
        head("A: 1\0"),
        b"HTTP/1.1 200 OK\nA: 1\r\n\r\n",
    ],
)
def test_a_head_that_means_two_things_is_refused(wrong):
    with pytest.raises(ProtocolError):
        parse_response_head(wrong)


def test_spaces_within_a_field_cost_no_more_than_others():
    """With a square of their number, this takes minutes."""
    found = parse_response_head(
        head("Connection: a" + " " * 60_000 + "b", "Content-Length: \t 3 \t ", "X: y")
    )
    assert found.keep_alive
    assert found.body.feed(b"abcd") == 3
    assert found.lines.endswith(b"Content-Length: \t 3 \t \r\nX: y\r\n")


@pytest.mark.parametrize("every", [1, 2, 3, 7, 200])
@pytest.mark.parametrize(
    "trailers",
    [
        b"X: a\n\nHTTP/1.1 200 OK\r\n\r\n",
        b"\nHTTP/1.1 200 OK\r\n\r\n",
        b"X: a\r\rX: b\r\n\r\n",
        b"X: a\0\r\n\r\n",
        b"X a\r\n\r\n",
        b"X : a\r\n\r\n",
        b" X: a\r\n\r\n",
        b": a\r\n\r\n",
        b"Content-Length: 5\r\n\r\n",
        b"X: a\r\ntransfer-encoding: chunked\r\n\r\n",
        b"Set-Cookie: a=b\r\n\r\n",
    ],
)
def test_trailers_are_checked_before_they_go_on(trailers, every):
    """What has gone on before the fault must not end the answer for a client."""
    framed, body, gone_on = b"1\r\na\r\n0\r\n" + trailers, ChunkedBody(), []

    def feed_all():
        for at in range(0, len(framed), every):
            piece = framed[at : at + every]
            assert body.feed(piece) == len(piece)
            gone_on.append(piece)

    with pytest.raises(ProtocolError):
        feed_all()
    assert b"\n\n" not in b"".join(gone_on)
    assert not body.is_done


def test_trailers_of_a_sound_replica_go_on():
    framed = b"1\r\na\r\n0\r\nServer-Timing: a;dur=1\r\nX-Sum:\r\n\r\n"
    for cut in range(len(framed)):
        body = ChunkedBody()
        assert feed_in_pieces(body, framed, [cut]) == len(framed)
        assert body.is_done
