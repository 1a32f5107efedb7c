"""Options of the store of KV blocks."""

from __future__ import annotations

import argparse
from pathlib import Path

from banaserve.access.key_files import key_of
from banaserve.config import ServeConfig
from banaserve.kvstore.peers.options import KEY_VARIABLE, key_from_environment

_DEFAULTS = ServeConfig()


def add_store(parser: argparse.ArgumentParser) -> None:
    """Add these options to ``parser``."""
    add = parser.add_argument
    add(
        "--kv-store-size",
        default=_DEFAULTS.kv_store_size,
        metavar="SIZE",
        help="memory of the store, such as 8GiB",
    )
    add("--kv-store-ssd", type=Path, metavar="FOLDER", help="folder on a local disk for KV blocks")
    add(
        "--kv-store-ssd-size",
        default=_DEFAULTS.kv_store_ssd_size,
        metavar="SIZE",
        help="size of the files on that disk",
    )
    add(
        "--kv-store-distributed",
        default="",
        metavar="URL",
        help="share KV blocks with other stores, such as mooncake://HOST:PORT",
    )
    add(
        "--kv-store-listen",
        default="",
        metavar="HOST:PORT",
        help="let the stores of other servers fetch KV blocks here, with the same key and model",
    )
    add(
        "--kv-store-peer",
        action="append",
        default=[],
        metavar="HOST:PORT",
        help="fetch KV blocks from the store of another server; repeat for several",
    )
    add(
        "--kv-store-peer-key-file",
        type=Path,
        metavar="FILE",
        help=f"file with the key that these stores share (${KEY_VARIABLE})",
    )
    add(
        "--kv-store-tenant-quota",
        type=float,
        default=_DEFAULTS.kv_store_tenant_quota,
        metavar="FRACTION",
        help="share of the memory for one API key, or one cache_salt where there are none "
        "(0.5 with several keys, else 1)",
    )
    add(
        "--kv-store-fetch",
        choices=("cheaper", "always"),
        default=_DEFAULTS.kv_store_fetch,
        help="fetch as much of a prefix as is faster than computing it (cheaper), or all of it "
        "(always)",
    )
    add(
        "--kv-store-verify",
        action="store_true",
        help="keep checksums of KV blocks in memory and check them before each use",
    )
    add(
        "--kv-store-salt",
        default="",
        help="text that keeps the blocks of servers with another one apart",
    )
    add("--no-kv-store", action="store_true", help="serve without the store, with --colocated")


def peer_key_of(known: argparse.Namespace) -> str:
    """Return the key that stores of several servers share, from the file or the variable.

    Raises:
        UserError: The file cannot be used.
    """
    path = known.kv_store_peer_key_file
    return key_of("--kv-store-peer-key", None, path, key_from_environment())
