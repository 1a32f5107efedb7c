"""``banaserve kvstore``: start the KV cache store, show its status, check it or clear it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from banaserve.base.arguments import option
from banaserve.base.errors import StoreUnavailableError, UserError
from banaserve.base.plugins.discovery import PluginGroup
from banaserve.cli.app import App
from banaserve.cli.plugins import use_plugins, warn_of_rivalries
from banaserve.cli.terminal.console import print_json, print_rows
from banaserve.kvstore.client.admin import clear_store, fetch_stats
from banaserve.kvstore.daemon.options import DaemonOptions, socket_option
from banaserve.kvstore.daemon.process import serve
from banaserve.kvstore.sizes import format_size
from banaserve.kvstore.stats import StoreStats, TierReport, still_held
from banaserve.kvstore.tiers.ssd.folder import Folder

Row = tuple[str, str]
_JSON = "print JSON instead of a table"


def start(options: DaemonOptions) -> None:
    """Start the store in the foreground, unless a command follows."""
    use_plugins(PluginGroup.STORE_TIERS)
    warn_of_rivalries((PluginGroup.STORE_TIERS, urlsplit(options.distributed).scheme))
    if options.ssd is not None:
        Folder(options.ssd).close()  # an unusable one is an error here, not only a warning
    logging.basicConfig(level=logging.INFO, format="%(asctime)s kvstore %(levelname)s %(message)s")
    serve(options)


def status(
    socket_path: Path = socket_option(),
    as_json: bool = option(_JSON, False, name="--json"),
) -> None:
    """Show how full memory and tiers are, hit rates, leases and clients."""
    with _asking():
        stats = fetch_stats(socket_path)
    if as_json:
        print_json(stats)
    else:
        print_rows(store_rows(stats), {})


def check(
    ssd: Path = option("folder of the SSD tier", kind=Path, metavar="FOLDER"),
    as_json: bool = option(_JSON, False, name="--json"),
) -> int:
    """Verify every block of an SSD tier's folder; exit with 1 if one is damaged."""
    from banaserve.kvstore.tiers.ssd.scan import check_folder

    report = check_folder(ssd)
    if as_json:
        print_json(report)
    else:
        for problem in report.problems:
            print(problem)
        rows = [
            ("blocks", f"{report.num_ok} good, {report.num_dead} superseded or cleared"),
            ("damage", f"{report.num_torn} torn, {report.num_corrupt} corrupt"),
            ("files", f"{report.num_files} with {format_size(report.num_bytes)}"),
        ]
        if report.in_use:
            rows.append(("in use", "a store has it open: torn blocks may be unfinished"))
        print_rows(rows, {})
    return 0 if report.is_clean else 1


def clear(socket_path: Path = socket_option()) -> int:
    """Drop every block that is not in use, from memory and tiers; exit with 1 if some are left."""
    with _asking():
        cleared, stats = clear_store(socket_path), fetch_stats(socket_path)
    from_tiers = cleared.num_dropped_from_tiers
    print(f"dropped {cleared.num_dropped} blocks from memory, {from_tiers} from tiers")
    left = still_held(stats)
    for line in left:
        print(f"not empty: {line}")
    return 1 if left else 0


@contextlib.contextmanager
def _asking() -> Iterator[None]:
    """Report a store that does not answer as what the user can correct."""
    try:
        yield
    except StoreUnavailableError as error:
        raise UserError(f"{error}: give --socket (of a server's store: see kvstore.log)") from error


def store_rows(stats: StoreStats) -> list[Row]:
    """Return a row for each figure, memory and tiers first."""
    num_asked = stats.hits + stats.misses
    slot_size = format_size(stats.slot_bytes)
    rows = [
        (
            "memory",
            f"{_of(stats.used_bytes, stats.capacity_bytes)}, {_rate(stats.hits, num_asked)}"
            ", hand-overs included",
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
        ("kept for requests", f"{stats.kept_slots} slots ({stats.kept_given_way} given way)"),
        ("found for requests", _found(stats)),
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


def _found(stats: StoreStats) -> str:
    """Return the share of requested blocks that were found, beside that of an unlimited store."""
    if not (asked := stats.asked_blocks):
        return "none asked"
    findable = max(stats.found_blocks, asked - stats.new_blocks)
    return (
        f"{stats.found_blocks / asked:.1%} of {asked} blocks; an unlimited store would find about "
        f"{findable / asked:.1%}"
    )


def _per_s(bytes_per_s: float) -> str:
    return f"{format_size(int(bytes_per_s))}/s" if bytes_per_s else "speed unknown"


app = App(
    start,
    "Run the KV cache store, or look at one that runs.",
    status=status,
    check=check,
    clear=clear,
)
