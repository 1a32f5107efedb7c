"""Options on the store of KV blocks."""

from __future__ import annotations

import argparse
from pathlib import Path

from banaserve.config import ServeConfig

_DEFAULTS = ServeConfig()


def add_store(parser: argparse.ArgumentParser) -> None:
    """Add them to ``parser``."""
    add = parser.add_argument
    add("--kv-store-size", default=_DEFAULTS.kv_store_size, help="memory for KV blocks")
    add("--kv-store-ssd", type=Path, metavar="FOLDER", help="keep KV blocks on a local disk too")
    add("--kv-store-ssd-size", default=_DEFAULTS.kv_store_ssd_size, metavar="SIZE")
    add(
        "--kv-store-distributed",
        default="",
        metavar="URL",
        help="share KV blocks with other stores, such as mooncake://HOST:PORT",
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
        "--kv-store-verify",
        action="store_true",
        help="keep checksums of KV blocks in memory and check them before each use",
    )
    add("--kv-store-salt", default="", help="deployments with other salts share no blocks")
    add("--no-kv-store", action="store_true", help="with --colocated: serve without the store")
