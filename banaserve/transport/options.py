"""What a process needs to build any transport."""

from __future__ import annotations

import msgspec

MIN_SECRET_BYTES = 16


class TransportOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a process needs to build any transport.

    Attributes:
        folder: Private folder of the run, for Unix sockets.
        host: Address to listen on, where a transport uses TCP.
        secret: Of the run, at least 16 bytes, the same on both sides.
    """

    folder: str
    secret: bytes
    host: str = "127.0.0.1"

    def __post_init__(self) -> None:
        if len(self.secret) < MIN_SECRET_BYTES:
            raise ValueError(f"a secret has at least {MIN_SECRET_BYTES} bytes")

    def __repr__(self) -> str:
        return f"TransportOptions(folder={self.folder!r}, host={self.host!r})"
