"""Prometheus metrics of the store."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from banaserve.base.errors import StoreUnavailableError, UserError
from banaserve.kvstore.client.admin import fetch_stats
from banaserve.kvstore.stats import StoreStats

_PREFIX = "banaserve_kvstore_"
_COUNTERS = {
    "hits": "Keys asked for by acquire that were readable.",
    "misses": "Keys asked for by acquire that were not readable.",
    "joined": "Keys asked for by acquire that were on their way up for somebody else.",
    "evictions": "Blocks dropped to make room.",
    "commits": "Blocks that clients made readable.",
    "corrupt_blocks": "Blocks in memory whose checksum was wrong when they were asked for.",
    "quota_evictions": "Evictions that a tenant at its quota did to itself.",
    "quota_refusals": "Slots refused to a tenant at its quota.",
    "refused_clients": "Connections refused because of their fingerprint.",
    "layout_mismatches": "Connections whose layout differs from another of the same model.",
    "protocol_errors": "Connections closed because of what they sent.",
    "lent_blocks": "Blocks that stores of other machines have fetched.",
    "lent_bytes": "Bytes of these blocks.",
    "pushed_blocks": "Blocks offered to those stores while they were being written, and committed.",
    "pushed_by_layer_blocks": "Of these, blocks whose first layers went before their last.",
    "received_blocks": "Blocks that those stores have sent so.",
}
_GAUGES = {
    "capacity_bytes": "Size of the pool.",
    "used_bytes": "Bytes of slots in use.",
    "num_slots": "Slots in the pool.",
    "used_slots": "Slots that hold a block or are being written.",
    "writing_slots": "Slots that clients are writing.",
    "promoting_slots": "Slots that tiers fill or are about to fill.",
    "leased_slots": "Slots that at least one lease or hold covers.",
    "num_leases": "Leases held.",
    "num_holds": "Prompts whose blocks are held until decode has read them.",
    "held_slots": "Slots that hold blocks of these prompts.",
    "quarantined_slots": "Slots being written whose client is gone while its process lives.",
    "num_tenants": "Tenants that use at least one slot.",
    "clients": "Connections that share blocks.",
}


_TIER_COUNTERS = {
    "stores": "Blocks written.",
    "stored_bytes": "Bytes of blocks written.",
    "loads": "Blocks read.",
    "loaded_bytes": "Bytes of blocks read.",
    "evictions": "Blocks dropped to make room.",
    "missing": "Loads of blocks that were not there.",
    "corrupt": "Records that were wrong: skipped, never served.",
    "failures": "Loads and stores that failed otherwise.",
    "promoted": "Blocks copied into memory.",
    "promotion_failures": "Copies into memory that did not succeed.",
    "declined": "Blocks not fetched because computing was predicted cheaper.",
    "predicted_fetch_s": "Seconds predicted for promoted blocks.",
    "measured_fetch_s": "Seconds that these blocks took.",
    "demoted": "Blocks written behind.",
    "demotion_failures": "Writes that were not carried out.",
    "dropped_before_demotion": "Blocks that left memory before they were written.",
}
_TIER_GAUGES = {
    "available": "1 while the tier is in service.",
    "capacity_bytes": "Its budget; 0 where it has none of its own.",
    "used_bytes": "Bytes taken up.",
    "num_blocks": "Blocks that a load could return.",
    "in_flight": "Loads and stores under way.",
    "load_bytes_per_s": "Measured lately.",
    "store_bytes_per_s": "Measured lately.",
    "promoting_slots": "Slots that it fills or is about to fill.",
    "backlog_blocks": "Blocks waiting to be written.",
}


def prometheus_text(stats: StoreStats) -> str:
    """Return ``stats`` in Prometheus' text format."""
    lines = []
    for name, meaning in _COUNTERS.items():
        lines += _series(f"{_PREFIX}{name}_total", "counter", meaning, stats, name)
    for name, meaning in _GAUGES.items():
        lines += _series(_PREFIX + name, "gauge", meaning, stats, name)
    for name, meaning in _TIER_COUNTERS.items():
        lines += _tier_series(f"{_PREFIX}tier_{name}_total", "counter", meaning, stats, name)
    for name, meaning in _TIER_GAUGES.items():
        lines += _tier_series(f"{_PREFIX}tier_{name}", "gauge", meaning, stats, name)
    return "\n".join(lines) + "\n"


class MetricsServer:
    """HTTP server of ``GET /metrics`` on localhost, for the store on a socket.

    It asks the store over the socket like an operator, so that the store's loop serves one kind of
    client only.

    Raises:
        UserError: The port is not available.
    """

    def __init__(self, socket_path: Path, port: int) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                _answer(self, socket_path)

            def log_message(self, *_: object) -> None:
                """Log nothing: a line for each scrape would be too much."""

        try:
            self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        except (OSError, OverflowError) as error:
            raise UserError(f"cannot serve metrics on port {port}: {error}") from error
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()


def _answer(handler: BaseHTTPRequestHandler, socket_path: Path) -> None:
    if handler.path != "/metrics":
        handler.send_error(404)
        return
    try:
        body = prometheus_text(fetch_stats(socket_path)).encode()
    except StoreUnavailableError as error:
        handler.send_error(503, explain=str(error))
        return
    handler.send_response(200)
    handler.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def _head(name: str, kind: str, meaning: str) -> list[str]:
    return [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"]


def _series(name: str, kind: str, meaning: str, stats: StoreStats, field: str) -> list[str]:
    return [*_head(name, kind, meaning), f"{name} {getattr(stats, field)}"]


def _tier_series(name: str, kind: str, meaning: str, stats: StoreStats, field: str) -> list[str]:
    lines = []
    for tier in stats.tiers:
        owner = tier if hasattr(tier, field) else tier.stats
        lines.append(f'{name}{{tier="{tier.stats.name}"}} {+getattr(owner, field)}')
    return [*_head(name, kind, meaning), *lines] if lines else []
