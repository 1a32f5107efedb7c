"""Authentication of a TCP connection: a mutual handshake, then a code on every frame.

Both sides know the run's secret. Each sends a nonce and proves that it knows the secret; the keys
of the two directions come from secret and nonces by HKDF, so no frame is of use on another
connection or in the other direction. A frame's code is its AES-256-GMAC under the number of frames
before it, which both sides count: one that comes twice, late, changed or not at all makes the next
code a wrong one. Nothing is encrypted.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Iterable

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from banaserve.transport.errors import PeerGoneError, RefusedError
from banaserve.transport.stream import ByteStream

CODE_BYTES = 16
KEY_BYTES = 32
MAX_FRAMES = 2**48
"""In one direction of a connection: a nonce that comes twice under a key would give the key away.
A million frames a second are as many in nine years."""
_MAGIC = b"banaserve-transport-3\n"
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_GCM_NONCE_BYTES = 12

Part = memoryview | bytes | bytearray


class FrameCode:
    """Code of one frame, computed while its parts go by.

    Args:
        key: Of the direction.
        number: Frames before it in this direction.
    """

    def __init__(self, key: algorithms.AES, number: int) -> None:
        nonce = number.to_bytes(_GCM_NONCE_BYTES, "big")
        self._mac = Cipher(key, modes.GCM(nonce)).encryptor()

    def add(self, part: Part) -> None:
        """The frame's next bytes."""
        self._mac.authenticate_additional_data(part)

    def end(self) -> bytes:
        """The code of all that was added."""
        self._mac.finalize()
        return self._mac.tag


class Seal:
    """Codes of one connection's frames. Each direction is used by one thread at a time.

    Args:
        sending: Key of frames to the peer.
        receiving: Key of the peer's frames.
        max_frames: Of each direction.
    """

    def __init__(self, sending: bytes, receiving: bytes, max_frames: int = MAX_FRAMES) -> None:
        self._sending, self._receiving = algorithms.AES(sending), algorithms.AES(receiving)
        self._max_frames = max_frames
        self._num_sent = self._num_received = 0
        self._is_broken = False

    def sign(self, parts: Iterable[Part]) -> bytes:
        """The code of the next frame to be sent.

        Raises:
            PeerGoneError: The connection has carried all frames that its key is good for.
        """
        if self._num_sent >= self._max_frames:
            raise PeerGoneError("the connection has used its key up: connect again")
        code = FrameCode(self._sending, self._num_sent)
        self._num_sent += 1
        for part in parts:
            code.add(part)
        return code.end()

    def next_received(self) -> FrameCode:
        """What the code of the next frame is computed with; ``accept`` has to follow.

        Raises:
            PeerGoneError: As for ``sign``.
        """
        if self._num_received >= self._max_frames:
            raise PeerGoneError("the connection has used its key up: connect again")
        code = FrameCode(self._receiving, self._num_received)
        self._num_received += 1
        return code

    def accept(self, computed: FrameCode, code: bytes) -> bool:
        """Whether a received frame is the peer's next one; after one that is not, none is."""
        is_right = hmac.compare_digest(computed.end(), code)
        self._is_broken = self._is_broken or not is_right
        return not self._is_broken

    def verify(self, parts: Iterable[Part], code: bytes) -> bool:
        """``accept`` of a frame that is there as a whole.

        Raises:
            PeerGoneError: As for ``sign``.
        """
        computed = self.next_received()
        for part in parts:
            computed.add(part)
        return self.accept(computed, code)


def greet(stream: ByteStream, secret: bytes, deadline: float) -> Seal:
    """The connecting side's half of the handshake.

    Raises:
        RefusedError: The peer does not know the secret.
        PeerGoneError: The peer has gone, as it does where this side does not know the secret.
        TransferTimeoutError: The peer is not there in time.
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


def welcome(stream: ByteStream, secret: bytes, deadline: float) -> Seal:
    """The listening side's half of the handshake.

    Raises:
        RefusedError: The peer does not know the secret.
        PeerGoneError: The peer has gone.
        TransferTimeoutError: The peer says nothing in time.
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
