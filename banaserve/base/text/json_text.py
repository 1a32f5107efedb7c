"""Conversion to UTF-8 of the JSON encodings that Python's reader, and so vLLM, accepts."""

from __future__ import annotations

import codecs
import json

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
    decoder = codecs.getincrementaldecoder(encoding)()
    try:
        pieces = [
            decoder.decode(text[begin : begin + PIECE_BYTES]).encode()
            for begin in range(0, len(text), PIECE_BYTES)
        ]
        return b"".join([*pieces, decoder.decode(b"", final=True).encode()])
    except UnicodeError:
        return text
