"""Authentication of a TCP connection: a mutual handshake, then a code on every frame.

Both sides know the run's secret. Each sends a nonce and proves that it knows the secret; the keys
of the two directions come from secret and nonces, so no frame is of use on another connection or
in the other direction. Nothing is encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from collections.abc import Iterable

from banaserve.transport.errors import PeerGoneError, RefusedError
from banaserve.transport.stream import ByteStream

CODE_BYTES = 32
_MAGIC = b"banaserve-transport-1\n"
_NONCE_BYTES = 32


class Seal:
    """Codes of one connection's frames; HMAC-SHA256."""

    def __init__(self, sending: bytes, receiving: bytes) -> None:
        self._sending = hmac.new(sending, digestmod=hashlib.sha256)
        self._receiving = hmac.new(receiving, digestmod=hashlib.sha256)

    def sign(self, parts: Iterable[memoryview | bytes | bytearray]) -> bytes:
        """The code of a frame to be sent."""
        return _code(self._sending, parts)

    def verify(self, parts: Iterable[memoryview | bytes | bytearray], code: bytes) -> bool:
        """Whether a received frame is the peer's."""
        return hmac.compare_digest(_code(self._receiving, parts), code)


def greet(stream: ByteStream, secret: bytes, deadline: float) -> Seal:
    """The connecting side's half of the handshake.

    Raises:
        RefusedError: The peer does not know the secret.
        PeerGoneError: The peer has gone, as it does where this side does not know the secret.
        TransferTimeoutError: The peer is not there in time.
    """
    ours = secrets.token_bytes(_NONCE_BYTES)
    stream.write([_MAGIC + ours], deadline)
    answer = _read(stream, _NONCE_BYTES + CODE_BYTES, deadline)
    theirs = answer[:_NONCE_BYTES]
    if not hmac.compare_digest(answer[_NONCE_BYTES:], _derive(secret, b"server", ours + theirs)):
        raise RefusedError("the peer does not know this run's secret")
    stream.write([_derive(secret, b"client", ours + theirs)], deadline)
    return Seal(*(_derive(secret, way, ours + theirs) for way in (b"to server", b"to client")))


def welcome(stream: ByteStream, secret: bytes, deadline: float) -> Seal:
    """The listening side's half of the handshake.

    Raises:
        RefusedError: The peer does not know the secret.
        PeerGoneError: The peer has gone.
        TransferTimeoutError: The peer says nothing in time.
    """
    hello = _read(stream, len(_MAGIC) + _NONCE_BYTES, deadline)
    if not hello.startswith(_MAGIC):
        raise RefusedError("the peer speaks another protocol")
    ours, theirs = secrets.token_bytes(_NONCE_BYTES), hello[len(_MAGIC) :]
    stream.write([ours + _derive(secret, b"server", theirs + ours)], deadline)
    proof = _read(stream, CODE_BYTES, deadline)
    if not hmac.compare_digest(proof, _derive(secret, b"client", theirs + ours)):
        raise RefusedError("the peer does not know this run's secret")
    return Seal(*(_derive(secret, way, theirs + ours) for way in (b"to client", b"to server")))


def _derive(secret: bytes, purpose: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, struct.pack("<I", len(purpose)) + purpose + nonces, hashlib.sha256)


def _code(fresh: hmac.HMAC, parts: Iterable[memoryview | bytes | bytearray]) -> bytes:
    code = fresh.copy()
    for part in parts:
        code.update(part)
    return code.digest()


def _read(stream: ByteStream, num_bytes: int, deadline: float) -> bytes:
    answer = bytearray(num_bytes)
    left = memoryview(answer)
    try:
        # Not in one call, which goes on past the deadline as long as bytes keep coming: here they
        # come from any process.
        while left:
            stream.wait_readable(deadline)
            taken = min(len(left), stream.num_buffered())
            stream.read_into(left[:taken], deadline)
            left = left[taken:]
    except PeerGoneError as error:
        raise PeerGoneError(f"the handshake was broken off: {error}") from None
    return bytes(answer)
