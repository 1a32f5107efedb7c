"""Options of a store that shares blocks with those of other machines."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from banaserve.errors import UserError
from banaserve.net.addresses import host_and_port
from banaserve.transport.interface import MIN_SECRET_BYTES

KEY_VARIABLE = "BANASERVE_KV_STORE_PEER_KEY"
"""Variable with the key if no file is given, and for the daemon, whose command line is public."""


@dataclass(frozen=True, slots=True)
class PeerOptions:
    """Peers of a store.

    Attributes:
        listen: ``HOST:PORT`` where peers fetch blocks; empty if they cannot.
        peers: ``HOST:PORT`` of each store from which blocks are fetched.
        key: Key that both sides know.
    """

    listen: str = ""
    peers: tuple[str, ...] = ()
    key: str = field(default="", repr=False)

    @property
    def is_used(self) -> bool:
        """Return whether blocks are shared with other stores."""
        return bool(self.listen or self.peers)

    @property
    def secret(self) -> bytes:
        return self.key.encode()

    def check(self) -> None:
        """Check the options.

        Raises:
            UserError: An address is invalid, or there is no key of 16 or more characters.
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
        """Return the arguments of the daemon's command line."""
        listening = [f"--listen={self.listen}"] if self.listen else []
        return [*listening, *(f"--peer={peer}" for peer in self.peers)]

    def environment(self) -> dict[str, str]:
        """Return the environment variables of the daemon."""
        return {KEY_VARIABLE: self.key} if self.is_used else {}


NO_PEERS = PeerOptions()


def key_from_environment() -> str:
    """Return the value of ``KEY_VARIABLE``; empty if it is not set."""
    return os.environ.get(KEY_VARIABLE, "")
