"""JSON that Python's reader takes, in other encodings or beyond the standard."""

from __future__ import annotations

import json

import pytest

from banaserve.base.text.json_text import PIECE_BYTES, as_strict, as_utf8

VALUES = ({"a": "Grüße, 你好 🎉"}, [1, 2], "text", 7, {}, {"a": "b" * 5000})
ENCODINGS = (
    "utf-8",
    "utf-8-sig",
    "utf-16",
    "utf-16-le",
    "utf-16-be",
    "utf-32",
    "utf-32-le",
    "utf-32-be",
)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("space", ["", "\n ", "\t"])
@pytest.mark.parametrize("value", VALUES, ids=str)
def test_it_is_the_same_value_in_utf_8(value: object, space: str, encoding: str) -> None:
    text = space + json.dumps(value, ensure_ascii=False)
    assert as_utf8(text.encode(encoding)).decode() == text


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("shift", range(4))
def test_no_character_is_lost_between_two_pieces(shift: int, encoding: str) -> None:
    text = json.dumps("x" * shift + "é🎉" * PIECE_BYTES, ensure_ascii=False)
    assert as_utf8(text.encode(encoding)).decode() == text


@pytest.mark.parametrize(
    "text", [b"", b"\xff", b"\xff\xfe{", b"{\x00", b"\xfe\xff\xd8\x00", b"not json", b"\x00\x00"]
)
def test_what_is_in_no_encoding_is_not_lost(text: bytes) -> None:
    assert as_utf8(text) == text or as_utf8(text).decode(errors="surrogatepass")


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_half_of_a_surrogate_pair_stays_what_it_is(encoding: str) -> None:
    text = json.dumps("\ud83d", ensure_ascii=False).encode(encoding, "surrogatepass")
    assert json.loads(as_utf8(text)) == json.loads(text) == "\ud83d"
    assert as_strict(as_utf8(text)) == b'"?"'


@pytest.mark.parametrize(
    ("text", "strict"),
    [
        (b'{"a": NaN, "b": [-Infinity, 1e999], "c": 0.5}', b'{"a":null,"b":[null,null],"c":0.5}'),
        (rb'["\ud83d", "\ud83d\ude00", NaN]', '["?","😀",null]'.encode()),
        (b"9" * 100, b"9" * 100),
    ],
)
def test_what_python_alone_reads_becomes_strict(text: bytes, strict: bytes) -> None:
    assert as_strict(text) == strict


@pytest.mark.parametrize("text", [b"", b"{", b'"\xff"', b"9" * 5000, b"nan"])
def test_what_python_does_not_read_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # of json or of int()
        as_strict(text)
