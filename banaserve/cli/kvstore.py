"""``banaserve kvstore``: start the KV cache store, show its status, check it or clear it."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
import typer

from banaserve.access.key_files import key_of
from banaserve.cli.plugins import use_plugins, warn_of_rivalries
from banaserve.errors import StoreUnavailableError, UserError
from banaserve.kvstore.admin import clear_store, fetch_stats
from banaserve.kvstore.daemon.options import DEFAULT_SSD_SIZE, StoreOptions
from banaserve.kvstore.daemon.process import announce_ready, serve
from banaserve.kvstore.leftovers import still_held
from banaserve.kvstore.peers.options import KEY_VARIABLE, PeerOptions, key_from_environment
from banaserve.kvstore.sizes import format_size
from banaserve.kvstore.stats import StoreStats, TierReport
from banaserve.kvstore.tiers.ssd.folder import check_usable
from banaserve.plugins import PluginGroup

app = typer.Typer(
    name="kvstore", help="Run the KV cache store, or look at one that runs.", add_completion=False
)
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Row = tuple[str, str]


def default_socket_path() -> Path:
    """Return this user's default socket, in the session's run-time folder if there is one."""
    folder = os.environ.get("XDG_RUNTIME_DIR", tempfile.gettempdir())
    return Path(folder) / f"banaserve-kvstore-{os.geteuid()}.sock"


SocketOption = Annotated[
    Path,
    typer.Option("--socket", help="Unix socket of the store.", default_factory=default_socket_path),
]


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
    listen: Annotated[
        str, typer.Option(help="Where other stores fetch blocks.", metavar="HOST:PORT")
    ] = "",
    peer: Annotated[
        list[str] | None,
        typer.Option(help="Another store to fetch blocks from; repeat.", metavar="HOST:PORT"),
    ] = None,
    peer_key_file: Annotated[
        Path | None,
        typer.Option(help=f"Holds the key that all of them share; {KEY_VARIABLE}.", metavar="FILE"),
    ] = None,
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
    warn_of_rivalries((PluginGroup.STORE_TIERS, urlsplit(distributed).scheme))
    options = StoreOptions(
        size=size,
        ssd=ssd,
        ssd_size=ssd_size,
        distributed=distributed,
        tenant_quota=tenant_quota,
        verify_memory=verify_memory,
        poison_free_slots=poison_free_slots,
        peers=PeerOptions(
            listen,
            tuple(peer or ()),
            key_of("--peer-key", None, peer_key_file, key_from_environment()),
        ),
    )
    if ssd is not None:
        check_usable(ssd)
    config = options.config(socket_path, metrics_port=metrics_port, die_with_parent=die_with_parent)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s kvstore %(levelname)s %(message)s")
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
    """Verify every record of an SSD tier's folder; exit with 1 if a record is damaged."""
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
        cleared, stats = clear_store(socket_path), fetch_stats(socket_path)
    except StoreUnavailableError as error:
        raise UserError(str(error)) from error
    typer.echo(f"dropped {cleared.from_memory} blocks from memory, {cleared.from_tiers} from tiers")
    for line in still_held(stats):
        typer.echo(f"not empty: {line}")


def _print_rows(rows: list[tuple[str, str]]) -> None:
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        typer.echo(f"{name:<{width}}  {value}")


def store_rows(stats: StoreStats) -> list[Row]:
    """Return a row for each figure, memory and tiers first."""
    num_asked = stats.hits + stats.misses
    slot_size = format_size(stats.slot_bytes)
    rows = [
        (
            "memory",
            f"{_of(stats.used_bytes, stats.capacity_bytes)}, {_rate(stats.hits, num_asked)}",
        ),
        ("slots", f"{stats.used_slots} of {stats.num_slots} used, {slot_size} each"),
    ]
    for tier in stats.tiers:
        rows += _tier_rows(tier, stats.misses)
    return [
        *rows,
        ("being written", f"{stats.writing_slots} ({stats.quarantined_slots} quarantined)"),
        ("coming up", f"{stats.promoting_slots} ({stats.joined} reads joined others)"),
        ("leases", f"{stats.num_leases} and {stats.num_holds} holds on {stats.leased_slots} slots"),
        ("held for hand-overs", f"{stats.held_slots} slots"),
        ("evictions", str(stats.evictions)),
        (
            "tenants",
            f"{stats.num_tenants} ({stats.quota_evictions} evictions and "
            f"{stats.quota_refusals} refusals by quota)",
        ),
        ("corrupt in memory", str(stats.corrupt_blocks)),
        ("clients", f"{stats.clients} ({stats.refused_clients} refused)"),
        ("layout mismatches", str(stats.layout_mismatches)),
        ("protocol errors", str(stats.protocol_errors)),
        ("lent to peers", f"{stats.lent_blocks} blocks, {format_size(stats.lent_bytes)}"),
        ("pushed to peers", f"{stats.pushed_blocks} blocks, {stats.received_blocks} received"),
    ]


def _tier_rows(tier: TierReport, num_misses: int) -> list[Row]:
    name, stats = tier.stats.name, tier.stats
    if not stats.available:
        return [(name, f"out of service: {stats.problem}")]
    state = f"; {stats.problem}" if stats.problem else ""
    return [
        (
            name,
            f"{_of(stats.used_bytes, stats.capacity_bytes)}, {stats.num_blocks} blocks, "
            f"{_rate(tier.promoted, num_misses)}{state}",
        ),
        (
            f"{name} up",
            f"{tier.promoted} promoted, {tier.promoting_slots} coming, {tier.declined} declined, "
            f"{tier.promotion_failures} failed, {_per_s(stats.load_bytes_per_s)}, "
            f"{tier.measured_fetch_s:.3g} s where {tier.predicted_fetch_s:.3g} s were predicted",
        ),
        (
            f"{name} down",
            f"{tier.demoted} written, {tier.backlog_blocks} waiting, "
            f"{tier.dropped_before_demotion} evicted before, {tier.demotion_failures} failed, "
            f"{_per_s(stats.store_bytes_per_s)}",
        ),
        (
            f"{name} faults",
            f"{stats.corrupt} corrupt, {stats.missing} missing, {stats.failures} failed, "
            f"{stats.evictions} evicted",
        ),
    ]


def _of(used_bytes: int, capacity_bytes: int) -> str:
    if not capacity_bytes:
        return f"{format_size(used_bytes)} used"
    return f"{format_size(used_bytes)} of {format_size(capacity_bytes)} used"


def _rate(num_hits: int, num_asked: int) -> str:
    return f"{num_hits / num_asked:.1%} of {num_asked} blocks hit" if num_asked else "none asked"


def _per_s(bytes_per_s: float) -> str:
    return f"{format_size(int(bytes_per_s))}/s" if bytes_per_s else "speed unknown"
