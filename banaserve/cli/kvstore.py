"""``banaserve kvstore``: start the KV cache store, look at it, check it, clear it."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from banaserve.cli.kvstore_table import store_rows
from banaserve.cli.plugins import use_plugins
from banaserve.errors import StoreUnavailableError, UserError
from banaserve.kvstore.admin import clear_store, fetch_stats
from banaserve.kvstore.daemon import announce_ready, serve
from banaserve.kvstore.options import DEFAULT_SSD_SIZE, StoreOptions
from banaserve.kvstore.sizes import format_size
from banaserve.plugins import PluginGroup


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
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@app.callback(invoke_without_command=True)
def start(
    context: typer.Context,
    socket_path: SocketOption,
    size: Annotated[str, typer.Option(help="Memory for blocks, such as 2GiB or 512MB.")] = "2GiB",
    ssd: Annotated[
        Path | None, typer.Option(help="Folder of a tier on a local disk.", metavar="FOLDER")
    ] = None,
    ssd_size: Annotated[str, typer.Option(help="Its budget.")] = DEFAULT_SSD_SIZE,
    distributed: Annotated[
        str, typer.Option(help="A distributed tier, such as mooncake://HOST:PORT.", metavar="URL")
    ] = "",
    tenant_quota: Annotated[
        float, typer.Option(help="Share of the memory that one tenant may use.", metavar="FRACTION")
    ] = 1.0,
    verify_memory: Annotated[
        bool,
        typer.Option(
            "--verify-memory",
            help="Keep checksums of blocks in memory; costs about 130 us for each MiB leased.",
        ),
    ] = False,
    poison_free_slots: Annotated[
        bool, typer.Option("--poison-free-slots", help="Overwrite freed memory; slow.")
    ] = False,
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
    use_plugins(PluginGroup.STORE_TIERS)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s kvstore %(levelname)s %(message)s")
    options = StoreOptions(
        size=size,
        ssd=ssd,
        ssd_size=ssd_size,
        distributed=distributed,
        tenant_quota=tenant_quota,
        verify_memory=verify_memory,
        poison_free_slots=poison_free_slots,
    )
    config = options.config(socket_path, metrics_port=metrics_port, die_with_parent=die_with_parent)
    serve(config, lambda: announce_ready(ready_fd))


@app.command()
def status(socket_path: SocketOption, as_json: JsonOption = False) -> None:
    """Show how full memory and tiers are, hit rates, leases and clients."""
    try:
        stats = fetch_stats(socket_path)
    except StoreUnavailableError as error:
        raise UserError(str(error)) from error
    if as_json:
        typer.echo(json.dumps(msgspec.to_builtins(stats), indent=2))
    else:
        _print_rows(store_rows(stats))


@app.command()
def check(
    ssd: Annotated[Path, typer.Option(help="Folder of the SSD tier.", metavar="FOLDER")],
    as_json: JsonOption = False,
) -> None:
    """Verify every record of an SSD tier's folder; exit code 1 where one is damaged."""
    from banaserve.kvstore.tiers.ssd.check import check_folder

    report = check_folder(ssd)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(report), indent=2))
    else:
        for problem in report.problems:
            typer.echo(problem)
        size = format_size(report.num_bytes)
        _print_rows(
            [
                ("blocks", f"{report.num_ok} good, {report.num_dead} superseded or cleared"),
                ("damage", f"{report.num_torn} torn, {report.num_corrupt} corrupt"),
                ("files", f"{report.num_segments} with {size}"),
                *(
                    [("in use", "a store has it open: torn records may be unfinished")]
                    if report.in_use
                    else []
                ),
            ]
        )
    if not report.is_clean:
        raise typer.Exit(1)


@app.command()
def clear(socket_path: SocketOption) -> None:
    """Drop every block that is not in use, from memory and tiers."""
    try:
        cleared = clear_store(socket_path)
    except StoreUnavailableError as error:
        raise UserError(str(error)) from error
    typer.echo(f"dropped {cleared.from_memory} blocks from memory, {cleared.from_tiers} from tiers")


def _print_rows(rows: list[tuple[str, str]]) -> None:
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        typer.echo(f"{name:<{width}}  {value}")
