"""Prometheus metrics of the store."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from banaserve.base.errors import StoreUnavailableError, UserError
from banaserve.kvstore.client.admin import fetch_stats
from banaserve.kvstore.stats import Measure, StoreStats, TierReport, TierStats, measures_of

REQUEST_S = 10.0
"""Maximum silence of a client, in seconds; each one takes a thread and a descriptor."""


def prometheus_text(stats: StoreStats) -> str:
    """Return ``stats`` in Prometheus' text format."""
    lines: list[str] = []
    for name, measure in measures_of(StoreStats).items():
        lines += _series(name, measure, [("", getattr(stats, name))])
    for name, measure in measures_of(TierReport).items():
        values = [(_label(tier), getattr(tier, name)) for tier in stats.tiers]
        lines += _series(f"tier_{name}", measure, values)
    for name, measure in measures_of(TierStats).items():
        values = [(_label(tier), +getattr(tier.stats, name)) for tier in stats.tiers]
        lines += _series(f"tier_{name}", measure, values)
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
            timeout = REQUEST_S

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


def _label(tier: TierReport) -> str:
    return f'{{tier="{tier.stats.name}"}}'


def _series(field: str, measure: Measure, values: Sequence[tuple[str, float]]) -> list[str]:
    """Return the lines of a metric with the values of its labels; none without a value."""
    if not values:
        return []
    name = f"banaserve_kvstore_{field}" + ("_total" if measure.kind == "counter" else "")
    head = [f"# HELP {name} {measure.meaning}", f"# TYPE {name} {measure.kind}"]
    return head + [f"{name}{label} {value}" for label, value in values]
