"""Authentication of a TCP connection: a mutual handshake, then a code on every frame.

Both sides know the run's secret. Each sends a nonce and proves that it knows the secret; the keys
of the two directions are derived from secret and nonces by HKDF, so a frame is not valid on another
connection or in the other direction. The code of a frame is its AES-256-GMAC with the number of
frames before it as the nonce. Both sides count the frames: if a frame is repeated, delayed, changed
or lost, the next code is wrong. Nothing is encrypted.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Iterable

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from banaserve.transport.channels.stream import SocketStream
from banaserve.transport.errors import PeerGoneError, RefusedError

CODE_BYTES = 16
KEY_BYTES = 32
MAX_FRAMES = 2**48
"""Maximum number of frames in one direction of a connection: a nonce that is used twice with a key
would reveal the key. At a million frames a second it is reached after nine years."""
_MAGIC = b"banaserve-transport-5\n"
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_GCM_NONCE_BYTES = 12

Part = memoryview | bytes | bytearray


class FrameCode:
    """Code of one frame, the ``number``-th in the direction of ``key``, computed part by part."""

    def __init__(self, key: algorithms.AES, number: int) -> None:
        nonce = number.to_bytes(_GCM_NONCE_BYTES, "big")
        self._mac = Cipher(key, modes.GCM(nonce)).encryptor()

    def add(self, part: Part) -> None:
        """Add the frame's next bytes."""
        self._mac.authenticate_additional_data(part)

    def end(self) -> bytes:
        """Return the code of all added bytes."""
        self._mac.finalize()
        return self._mac.tag


class Seal:
    """Codes of one connection's frames. Each direction is used by one thread at a time."""

    def __init__(self, sending: bytes, receiving: bytes, max_frames: int = MAX_FRAMES) -> None:
        self._sending, self._receiving = algorithms.AES(sending), algorithms.AES(receiving)
        self._max_frames = max_frames
        self._num_sent = self._num_received = 0
        self._is_broken = False

    def sign(self, parts: Iterable[Part]) -> bytes:
        """Return the code of the next frame to be sent; raises as ``next_received`` does."""
        code = self._code(self._sending, self._num_sent)
        self._num_sent += 1
        for part in parts:
            code.add(part)
        return code.end()

    def next_received(self) -> FrameCode:
        """Return the code object for the next received frame; pass it to ``accept`` afterwards.

        Raises:
            PeerGoneError: The connection has reached its maximum number of frames.
        """
        code = self._code(self._receiving, self._num_received)
        self._num_received += 1
        return code

    def accept(self, computed: FrameCode, code: bytes) -> bool:
        """Return whether a received frame is the peer's next one; False after the first wrong."""
        is_right = hmac.compare_digest(computed.end(), code)
        self._is_broken = self._is_broken or not is_right
        return not self._is_broken

    def _code(self, key: algorithms.AES, number: int) -> FrameCode:
        if number >= self._max_frames:
            raise PeerGoneError("the connection has used its key up: connect again")
        return FrameCode(key, number)


def greet(stream: SocketStream, secret: bytes, deadline: float) -> Seal:
    """Perform the connecting side's half of the handshake.

    Raises:
        RefusedError: The peer does not know the secret.
        PeerGoneError: The peer is gone; it closes if this side does not know the secret.
        TransferTimeoutError: The peer does not answer in time.
    """
    ours = secrets.token_bytes(_NONCE_BYTES)
    stream.write([_MAGIC + ours], deadline)
    answer = _read(stream, _NONCE_BYTES + _PROOF_BYTES, deadline)
    theirs = answer[:_NONCE_BYTES]
    if not hmac.compare_digest(answer[_NONCE_BYTES:], _derive(secret, b"server", ours + theirs)):
        raise RefusedError("the peer does not know this run's secret")
    stream.write([_derive(secret, b"client", ours + theirs)], deadline)
    to_server, to_client = _ways(secret, ours + theirs)
    return Seal(to_server, to_client)


def welcome(stream: SocketStream, secret: bytes, deadline: float) -> Seal:
    """Perform the listening side's half of the handshake.

    Raises:
        RefusedError: The peer does not know the secret, or speaks another protocol.
        PeerGoneError: The peer is gone.
        TransferTimeoutError: The peer does not answer in time.
    """
    hello = _read(stream, len(_MAGIC) + _NONCE_BYTES, deadline)
    if not hello.startswith(_MAGIC):
        raise RefusedError("the peer speaks another protocol: install the same banaserve")
    ours, theirs = secrets.token_bytes(_NONCE_BYTES), hello[len(_MAGIC) :]
    stream.write([ours + _derive(secret, b"server", theirs + ours)], deadline)
    proof = _read(stream, _PROOF_BYTES, deadline)
    if not hmac.compare_digest(proof, _derive(secret, b"client", theirs + ours)):
        raise RefusedError("the peer does not know this run's secret")
    to_server, to_client = _ways(secret, theirs + ours)
    return Seal(to_client, to_server)


def _ways(secret: bytes, nonces: bytes) -> tuple[bytes, bytes]:
    return _derive(secret, b"to server", nonces), _derive(secret, b"to client", nonces)


def _derive(secret: bytes, purpose: bytes, nonces: bytes) -> bytes:
    hkdf = HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=nonces, info=_MAGIC + purpose)
    return hkdf.derive(secret)


def _read(stream: SocketStream, num_bytes: int, deadline: float) -> bytes:
    answer = bytearray(num_bytes)
    left = memoryview(answer)
    try:
        # Not in one call, which continues after the deadline as long as bytes arrive: during the
        # handshake the bytes may come from any process.
        while left:
            stream.wait_readable(deadline)
            taken = min(len(left), stream.num_buffered())
            stream.read_into(left[:taken], deadline)
            left = left[taken:]
    except PeerGoneError as error:
        raise PeerGoneError(f"the handshake was broken off: {error}") from None
    return bytes(answer)
