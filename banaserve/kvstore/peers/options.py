"""Options of a store that shares blocks with those of other machines."""

from __future__ import annotations

from dataclasses import dataclass

from banaserve.base.access.key_files import PEER_KEY_VARIABLE, key_option
from banaserve.base.arguments import option
from banaserve.base.errors import UserError
from banaserve.base.net.addresses import host_and_port
from banaserve.transport.interface import MIN_SECRET_BYTES


@dataclass(frozen=True, slots=True)
class PeerOptions:
    """Peers of a store.

    Attributes:
        listen: ``HOST:PORT``; empty if peers cannot fetch blocks.
        key: Key that both sides know.
    """

    listen: str = option("where other stores fetch blocks", "", metavar="HOST:PORT")
    peers: tuple[str, ...] = option(
        "another store to fetch blocks from; repeat for several",
        (),
        name="--peer",
        metavar="HOST:PORT",
    )
    key: str = key_option(
        "--peer-key",
        "",
        f"file with the key that all of them share (${PEER_KEY_VARIABLE})",
        PEER_KEY_VARIABLE,
    )

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
        for name, address in (
            *((("--kv-store-listen", self.listen),) if self.listen else ()),
            *(("--kv-store-peer", peer) for peer in self.peers),
        ):
            host_and_port(name, address)
        if self.is_used and len(self.secret) < MIN_SECRET_BYTES:
            raise UserError(
                f"stores that share blocks need a key of {MIN_SECRET_BYTES} characters or more, "
                "the same on all machines: give --kv-store-peer-key-file or set "
                f"{PEER_KEY_VARIABLE}"
            )

    def arguments(self) -> list[str]:
        """Return the arguments of the daemon's command line."""
        listening = [f"--listen={self.listen}"] if self.listen else []
        return [*listening, *(f"--peer={peer}" for peer in self.peers)]

    def environment(self) -> dict[str, str]:
        """Return the environment variables of the daemon."""
        return {PEER_KEY_VARIABLE: self.key} if self.is_used else {}


NO_PEERS = PeerOptions()
