"""Options of the store, in human-readable units."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from banaserve.base.access.key_files import PEER_KEY_VARIABLE, key_option
from banaserve.base.arguments import derived, option, options_of, values_of
from banaserve.base.config.serve_config import KEPT_QUOTA, ServeConfig
from banaserve.base.errors import UserError
from banaserve.base.net.addresses import host_and_port
from banaserve.kvstore.fingerprint import PAGE_BYTES
from banaserve.kvstore.sizes import parse_size
from banaserve.kvstore.tiers.registry import distributed_tier
from banaserve.transport.interface import MIN_SECRET_BYTES

DISTRIBUTED_VARIABLE = "BANASERVE_KVSTORE_DISTRIBUTED"
"""Variable with the URL of the distributed tier, used if the daemon's command line has none."""


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
            *((("address for peers", self.listen),) if self.listen else ()),
            *(("peer", peer) for peer in self.peers),
        ):
            host_and_port(name, address)
        if self.is_used and len(self.secret) < MIN_SECRET_BYTES:
            raise UserError(
                f"stores that share blocks need a key of {MIN_SECRET_BYTES} characters or more, "
                "the same on all machines: give --kv-store-peer-key-file (of `banaserve kvstore`: "
                f"--peer-key-file) or set {PEER_KEY_VARIABLE}"
            )

    def arguments(self) -> list[str]:
        """Return the arguments of the daemon's command line."""
        listening = [f"--listen={self.listen}"] if self.listen else []
        return [*listening, *(f"--peer={peer}" for peer in self.peers)]

    def environment(self) -> dict[str, str]:
        """Return the environment variables of the daemon."""
        return {PEER_KEY_VARIABLE: self.key} if self.is_used else {}


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Options common to ``banaserve kvstore``, ``banaserve serve`` and the daemon's command line.

    Attributes:
        size: Size of the memory for blocks.
        ssd: Folder of the SSD tier; None for no such tier. The store runs without a tier that
            cannot be opened.
        distributed: URL of a distributed tier; empty for no such tier.
        tenant_quota: Largest share of the memory's slots that one tenant may use; 1 sets no limit.
        kept_quota: Largest share of the memory's slots, and of a tenant's share, for blocks that
            requests ask to keep.
        verify_memory: True to keep a checksum of each readable slot and check it at each lease, on
            the store's thread.
        peers: Stores of other machines that share blocks with this one.
    """

    size: str = option("memory for blocks, such as 2GiB or 512MB", "2GiB")
    ssd: Path | None = option("folder of a tier on a local disk", None, Path, metavar="FOLDER")
    ssd_size: str = option("budget of that tier", "20GiB")
    distributed: str = option(
        "a distributed tier, such as mooncake://HOST:PORT",
        "",
        metavar="URL",
        read=lambda known: known.distributed or os.environ.get(DISTRIBUTED_VARIABLE, ""),
    )
    peers: PeerOptions = derived(
        PeerOptions(),
        lambda known: PeerOptions(**values_of(PeerOptions, known)),
        *options_of(PeerOptions),
    )
    tenant_quota: float = option(
        "share of the memory that one tenant may use", 1.0, metavar="FRACTION"
    )
    kept_quota: float = option(
        "share of the memory, and of a tenant's part of it, for blocks that requests ask to keep",
        KEPT_QUOTA,
        metavar="FRACTION",
    )
    verify_memory: bool = option(
        "keep checksums of blocks in memory; costs about 130 us for each MiB leased", False
    )
    poison_free_slots: bool = option("overwrite freed memory; slow", False)

    @classmethod
    def of(cls, config: ServeConfig) -> StoreOptions:
        """Return the options of ``banaserve serve``."""
        return cls(
            size=config.kv_store_size,
            ssd=config.kv_store_ssd,
            ssd_size=config.kv_store_ssd_size,
            distributed=config.kv_store_distributed,
            tenant_quota=config.tenant_quota,
            kept_quota=config.kv_store_kept_quota,
            verify_memory=config.kv_store_verify,
            peers=PeerOptions(
                config.kv_store_listen, config.kv_store_peers, config.kv_store_peer_key
            ),
        )

    @property
    def pool_bytes(self) -> int:
        """Size of the memory for blocks, which is allocated at start.

        Raises:
            UserError: The size is invalid.
        """
        return parse_size(self.size)

    def check(self) -> None:
        """Check the options, without opening a tier.

        Raises:
            UserError: An option is invalid.
        """
        if not 0.0 < self.tenant_quota <= 1.0:
            raise UserError(
                f"a tenant quota of {self.tenant_quota:g} makes no sense: "
                "write a share of the memory, more than 0 and at most 1"
            )
        if not 0.0 <= self.kept_quota <= 1.0:
            raise UserError(
                f"a quota of {self.kept_quota:g} for kept blocks makes no sense: "
                "write a share of the memory, from 0 to 1"
            )
        self.peers.check()
        if self.pool_bytes < PAGE_BYTES:
            raise UserError(f"a store of {self.size} is too small: give a size such as 1GiB")
        ssd_bytes = parse_size(self.ssd_size)
        if self.ssd is not None:
            # Imported only here: most stores have no such tier.
            from banaserve.kvstore.tiers.ssd.tier import check_capacity

            check_capacity(ssd_bytes)
        if self.distributed:
            distributed_tier(self.distributed)

    def arguments(self) -> list[str]:
        """Return the daemon's command-line arguments, which ``environment`` completes."""
        words = ["--size", self.size, "--tenant-quota", str(self.tenant_quota)]
        words += ["--kept-quota", str(self.kept_quota)]
        if self.ssd is not None:
            words += [f"--ssd={self.ssd}", f"--ssd-size={self.ssd_size}"]
        words += ["--verify-memory"] if self.verify_memory else []
        words += ["--poison-free-slots"] if self.poison_free_slots else []
        return words + self.peers.arguments()

    def environment(self) -> dict[str, str]:
        """Return the daemon's variables: a URL may hold a password, which no command line shows."""
        url = {DISTRIBUTED_VARIABLE: self.distributed} if self.distributed else {}
        return {**url, **self.peers.environment()}


def default_socket_path() -> Path:
    """Return this user's default socket, in the session's run-time folder if there is one."""
    folder = os.environ.get("XDG_RUNTIME_DIR", tempfile.gettempdir())
    return Path(folder) / f"banaserve-kvstore-{os.geteuid()}.sock"


def socket_option() -> Any:
    """Declare the socket of a store."""
    return option(
        "Unix socket of the store (one of this user's)",
        Path(),
        Path,
        name="--socket",
        decided=True,
        read=lambda known: known.socket_path or default_socket_path(),
    )


@dataclass(frozen=True, slots=True)
class DaemonOptions(StoreOptions):
    """Options of the store's process: ``banaserve kvstore`` and the daemon have the same ones."""

    socket_path: Path = socket_option()
    metrics_port: int = option(
        "serve Prometheus metrics on this port of localhost; 0 for none", 0, metavar="PORT"
    )
    ready_fd: int | None = option(
        "file descriptor that gets a line when clients can connect", None, int
    )
    die_with_parent: bool = option("stop when the starting process is gone", False)
