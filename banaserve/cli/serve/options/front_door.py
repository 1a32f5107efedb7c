"""Options of the front door: its socket, its keys, its limits."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from banaserve.access.key_files import key_of, keys_of
from banaserve.config import ServeConfig, TakeOver

_DEFAULTS = ServeConfig()


def add_front_door(parser: argparse.ArgumentParser) -> None:
    """Add these options to ``parser``."""
    add = parser.add_argument
    add("--host", default=_DEFAULTS.host, help="address to listen at")
    add("--port", type=int, default=_DEFAULTS.port, help="port to listen at")
    add(
        "--take-over",
        nargs="?",
        const="",
        metavar="RUN_DIR",
        help="replace the server that runs there, or the one on --port: once this one can serve it "
        "takes its socket, and that one ends with its last request",
    )
    add("--api-key", action="append", help="key that clients must give; repeat for several")
    add("--tenants", type=Path, metavar="FILE", help="TOML file with API keys and their limits")
    add(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="file with such keys, one a line: other users can read a command line",
    )
    add(
        "--max-concurrent-requests",
        type=int,
        default=_DEFAULTS.max_concurrent_requests,
        metavar="N",
        help="requests that may be under way at once; more are answered with status 429",
    )
    add(
        "--admin-key",
        help="key that opens the admin API (one is made for the run and kept in its folder)",
    )
    add("--admin-key-file", type=Path, metavar="FILE", help="file with the admin key")
    add("--no-ui", action="store_true", help="serve no page under /ui")
    add("--metrics-key", help="key of /metrics, which API keys open too (all may read it)")
    add("--metrics-key-file", type=Path, metavar="FILE", help="file with that key")
    add(
        "--max-body-size",
        default=_DEFAULTS.max_body_size,
        metavar="SIZE",
        help="most bytes of a request's body",
    )
    _add_connections(parser)
    add(
        "--request-bound",
        action="append",
        default=[],
        metavar="NAME=N",
        help="what a request may hold at most, such as messages=4096; repeat for several",
    )
    add(
        "--request-timeout",
        type=float,
        default=_DEFAULTS.request_timeout_s,
        metavar="SECONDS",
        help="time for a whole request, all of its legs",
    )
    add(
        "--drain-timeout",
        type=float,
        default=_DEFAULTS.drain_timeout_s,
        metavar="SECONDS",
        help="time that SIGTERM waits for requests under way; 0 waits for none",
    )


def _add_connections(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--max-connections",
        type=int,
        default=_DEFAULTS.max_connections,
        metavar="N",
        help="connections of clients; beyond, the oldest without a key is closed (0: by the limit "
        "of file descriptors, 16384 at most)",
    )
    add(
        "--max-connections-per-address",
        type=int,
        default=_DEFAULTS.max_connections_per_address,
        metavar="N",
        help="connections from one address without a key (0: a quarter of all)",
    )
    add(
        "--body-timeout",
        type=float,
        default=_DEFAULTS.body_timeout_s,
        metavar="SECONDS",
        help="time for a request's body, and a second more for each 64 KiB that have come",
    )


def take_over_of(known: argparse.Namespace) -> TakeOver | None:
    """Return the server that ``--take-over`` names; None if no server is replaced."""
    if known.take_over is None:
        return None
    return TakeOver(Path(known.take_over) if known.take_over else None)


def api_keys_of(known: argparse.Namespace) -> tuple[str, ...]:
    """Return the keys of ``--api-key`` and its file; without them, that of the variable.

    Raises:
        UserError: The file cannot be used.
    """
    from_env = [key for key in [os.environ.get("BANASERVE_API_KEY", "")] if key]
    return keys_of("--api-key", known.api_key or (), known.api_key_file, from_env)


def operator_key_of(known: argparse.Namespace, name: str) -> str:
    """Return the key of ``--NAME-key``, its file or its variable.

    Raises:
        UserError: Key and file are both given, or the file cannot be used.
    """
    given, path = getattr(known, f"{name}_key"), getattr(known, f"{name}_key_file")
    usual = os.environ.get(f"BANASERVE_{name.upper()}_KEY", "")
    return key_of(f"--{name}-key", given, path, usual)
