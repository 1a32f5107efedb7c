"""Options of a store that shares blocks with those of other machines."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from banaserve.errors import UserError
from banaserve.net.addresses import host_and_port
from banaserve.transport.interface import MIN_SECRET_BYTES

KEY_VARIABLE = "BANASERVE_KV_STORE_PEER_KEY"
"""Holds the key where no file is given, and for the daemon, whose command line is no secret."""


@dataclass(frozen=True, slots=True)
class PeerOptions:
    """Peers of a store.

    Attributes:
        listen: ``HOST:PORT`` where peers fetch blocks; empty: they cannot.
        peers: ``HOST:PORT`` of each store that blocks are fetched from.
        key: Both sides know it.
    """

    listen: str = ""
    peers: tuple[str, ...] = ()
    key: str = field(default="", repr=False)

    @property
    def is_used(self) -> bool:
        """Whether there is anything to share with."""
        return bool(self.listen or self.peers)

    @property
    def secret(self) -> bytes:
        return self.key.encode()

    def check(self) -> None:
        """Return if all of it makes sense.

        Raises:
            UserError: An address is none, or there is no key of 16 characters and more.
        """
        for option, address in (
            *((("--kv-store-listen", self.listen),) if self.listen else ()),
            *(("--kv-store-peer", peer) for peer in self.peers),
        ):
            host_and_port(option, address)
        if self.is_used and len(self.secret) < MIN_SECRET_BYTES:
            raise UserError(
                f"stores that share blocks need a key of {MIN_SECRET_BYTES} characters or more, "
                f"the same on all machines: give --kv-store-peer-key-file or set {KEY_VARIABLE}"
            )

    def arguments(self) -> list[str]:
        """Of the daemon's command line."""
        listening = [f"--listen={self.listen}"] if self.listen else []
        return [*listening, *(f"--peer={peer}" for peer in self.peers)]

    def environment(self) -> dict[str, str]:
        """Of the daemon."""
        return {KEY_VARIABLE: self.key} if self.is_used else {}


NO_PEERS = PeerOptions()


def key_from_environment() -> str:
    """That of ``KEY_VARIABLE``; empty where it is not set."""
    return os.environ.get(KEY_VARIABLE, "")
