"""``banaserve kvstore``: start the KV cache store, look at it, clear it."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from banaserve.errors import StoreUnavailableError, UserError
from banaserve.kvstore.admin import clear_store, fetch_stats
from banaserve.kvstore.daemon import announce_ready, serve
from banaserve.kvstore.server import DaemonConfig
from banaserve.kvstore.sizes import format_size, parse_size
from banaserve.kvstore.stats import StoreStats


def default_socket_path() -> Path:
    """A place of this user: in the session's run-time folder where there is one."""
    folder = os.environ.get("XDG_RUNTIME_DIR", tempfile.gettempdir())
    return Path(folder) / f"banaserve-kvstore-{os.geteuid()}.sock"


app = typer.Typer(
    name="kvstore", help="Run the KV cache store, or look at one that runs.", add_completion=False
)
SocketOption = Annotated[
    Path,
    typer.Option("--socket", help="Unix socket of the store.", default_factory=default_socket_path),
]


@app.callback(invoke_without_command=True)
def start(
    context: typer.Context,
    socket_path: SocketOption,
    size: Annotated[str, typer.Option(help="Memory for blocks, such as 2GiB or 512MB.")] = "2GiB",
    metrics_port: Annotated[
        int, typer.Option(help="Serve Prometheus metrics on this port of localhost; 0 for none.")
    ] = 0,
    ready_fd: Annotated[
        int | None, typer.Option(help="File descriptor that gets a line when clients can connect.")
    ] = None,
    die_with_parent: Annotated[
        bool, typer.Option("--die-with-parent", help="Stop when the starting process is gone.")
    ] = False,
) -> None:
    """Start the store in the foreground, unless a command follows."""
    if context.invoked_subcommand is not None:
        return
    logging.basicConfig(level=logging.INFO, format="%(asctime)s kvstore %(levelname)s %(message)s")
    config = DaemonConfig(
        socket_path=socket_path,
        pool_bytes=parse_size(size),
        metrics_port=metrics_port,
        die_with_parent=die_with_parent,
    )
    serve(config, lambda: announce_ready(ready_fd))


@app.command()
def status(
    socket_path: SocketOption,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show how full the store is, its hit rate, leases and clients."""
    try:
        stats = fetch_stats(socket_path)
    except StoreUnavailableError as error:
        raise UserError(str(error)) from error
    if as_json:
        typer.echo(json.dumps(msgspec.to_builtins(stats), indent=2))
        return
    rows = _rows(stats)
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        typer.echo(f"{name:<{width}}  {value}")


@app.command()
def clear(socket_path: SocketOption) -> None:
    """Drop every block that is not in use."""
    try:
        num_dropped = clear_store(socket_path)
    except StoreUnavailableError as error:
        raise UserError(str(error)) from error
    typer.echo(f"dropped {num_dropped} blocks")


def _rows(stats: StoreStats) -> list[tuple[str, str]]:
    num_asked = stats.hits + stats.misses
    hit_rate = f"{stats.hits / num_asked:.1%} of {num_asked} blocks" if num_asked else "none asked"
    used, capacity = format_size(stats.used_bytes), format_size(stats.capacity_bytes)
    slot_size = format_size(stats.slot_bytes)
    return [
        ("tiers", ", ".join(["memory", *(tier.stats.name for tier in stats.tiers)])),
        ("memory", f"{used} of {capacity} used"),
        ("slots", f"{stats.used_slots} of {stats.num_slots} used, {slot_size} each"),
        ("being written", f"{stats.writing_slots} ({stats.quarantined_slots} quarantined)"),
        ("leases", f"{stats.num_leases} on {stats.leased_slots} slots"),
        ("hit rate", hit_rate),
        ("evictions", str(stats.evictions)),
        ("clients", f"{stats.clients} ({stats.refused_clients} refused)"),
        ("layout mismatches", str(stats.layout_mismatches)),
        ("protocol errors", str(stats.protocol_errors)),
    ]
