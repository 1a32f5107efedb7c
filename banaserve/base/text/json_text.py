"""Conversion to strict JSON in UTF-8 of what Python's reader, and so vLLM, accepts as JSON."""

from __future__ import annotations

import codecs
import json

import msgspec

PIECE_BYTES = 64 * 2**10
"""Number of bytes converted at a time: other threads run only between two pieces."""
_BEGINS = (b"{", b"[", b'"', b" ", b"\n")


def as_utf8(text: bytes) -> bytes:
    """Return JSON in UTF-8 without a byte order mark; undecodable text is returned unchanged.

    UTF-16 and UTF-32 are recognised by their byte order marks, or by the zero bytes among the first
    characters (RFC 4627, 3).
    """
    if text[:1] in _BEGINS and text[1:2] != b"\0":
        return text
    encoding = json.detect_encoding(text)
    if encoding == "utf-8":
        return text
    decoder = codecs.getincrementaldecoder(encoding)("surrogatepass")

    def piece(part: bytes, *, is_last: bool = False) -> bytes:
        return decoder.decode(part, is_last).encode(errors="surrogatepass")

    try:
        begins = range(0, len(text), PIECE_BYTES)
        pieces = [piece(text[begin : begin + PIECE_BYTES]) for begin in begins]
        return b"".join([*pieces, piece(b"", is_last=True)])
    except UnicodeError:
        return text


def as_strict(text: bytes) -> bytes:
    """Return JSON of the same shape that every parser accepts.

    Numbers that JSON does not have become null, and halves of surrogate pairs question marks.

    Raises:
        ValueError: The text is no JSON for Python's reader either.
        RecursionError: The text is nested too deeply.
    """
    value = json.loads(text)
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        whole = json.dumps(value, ensure_ascii=False).encode(errors="replace")
        return msgspec.json.encode(json.loads(whole))
