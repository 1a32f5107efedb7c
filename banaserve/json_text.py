"""Encodings of JSON: what Python's own reader takes, and vLLM with it, becomes UTF-8."""

from __future__ import annotations

import codecs
import json

PIECE_BYTES = 64 * 2**10
"""Converted at a time: other threads run only between two pieces."""
_BEGINS = (b"{", b"[", b'"', b" ", b"\n")


def as_utf8(text: bytes) -> bytes:
    """Returns JSON without a byte order mark, in UTF-8; what is in no encoding stays as it is.

    UTF-16 and UTF-32 are told by their marks, or by their first characters (RFC 4627, 3).
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
