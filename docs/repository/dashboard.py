"""The dashboard: of Grafana's own model, and its queries find what banaserve exports.

A Grafana to load it into is not among what can be installed by name; its makers' model of a
dashboard (``grafana-foundation-sdk``) and a parser of Prometheus' language are.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prometheus_client.registry import REGISTRY

from banaserve.kvstore.daemon.metrics import prometheus_text
from banaserve.kvstore.stats import StoreStats, TierReport
from banaserve.kvstore.tiers.interface import TierStats
from banaserve.orchestrator.planner.loop import metrics as of_the_loop  # noqa: F401  (registers its families)
from banaserve.serving.monitoring import metrics  # noqa: F401
from docs.repository.dashboard_queries import (
    DASHBOARD,
    PATH,
    AskedSeries,
    asked_series,
    panels,
    parsed,
)
from docs.repository.findings import Finding, at, too_few

_ENDINGS = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"], "gauge": [""]}
ROWS = {
    "Roles": {"banaserve_instance_ready", "banaserve_orchestrator_steps_total"},
    "Orchestrator": {
        "banaserve_orchestrator_decisions_total",
        "banaserve_orchestrator_held_total",
        "banaserve_orchestrator_rejected_total",
        "banaserve_orchestrator_cost_error_fraction",
    },
    "Survival": {
        "banaserve_instance_restarts_total",
        "banaserve_streams_resumed_total",
        "banaserve_streams_moved_total",
        "banaserve_streams_broken_total",
        "banaserve_requests_given_up_total",
    },
    "Nodes": {"banaserve_node_round_trip_seconds", "banaserve_node_bytes_per_second"},
}
"""Metrics that an operator looks for, by the row of the dashboard."""


def findings() -> Iterator[Finding]:
    """Yield queries of nothing, panels that cannot be read, and what Grafana would drop."""
    for panel in panels():
        yield from panel_findings(panel)
    own, of_vllm = _own_labels(), _vllm_metrics()
    series = asked_series()
    yield from too_few(PATH, {one.metric for one in series}, 50, "metrics")
    for one in series:
        yield from series_findings(one, own, of_vllm)
    yield from _rows()
    for place in lost(DASHBOARD, through_grafana(DASHBOARD)):
        yield Finding(PATH, 1, f"Grafana's model has no {place}")
    yield from layout_findings(DASHBOARD["panels"])


# Metrics ------------------------------------------------------------------------------------------


def _own_labels() -> dict[str, set[str]]:
    """Labels of each metric of banaserve, by the name of its samples."""
    found: dict[str, set[str]] = {}
    for collector in REGISTRY._collector_to_names:
        name = str(getattr(collector, "_name", ""))
        if name.startswith("banaserve_"):
            labels = set(getattr(collector, "_labelnames", ()))
            for ending in _ENDINGS[getattr(collector, "_type", "")]:
                found[name + ending] = labels
    return found | _store_labels()


def _store_labels() -> dict[str, set[str]]:
    nothing: dict[str, Any] = dict.fromkeys(TierStats.__struct_fields__, 0)
    tier = TierReport(stats=TierStats(**nothing))
    numbers: dict[str, Any] = dict.fromkeys(StoreStats.__struct_fields__, 0)
    text = prometheus_text(StoreStats(**{**numbers, "tiers": (tier,)}))
    found: dict[str, set[str]] = {"banaserve_kvstore_up": set()}
    for name, labels in re.findall(r"^(banaserve_\w+)(\{.*\})? ", text, re.MULTILINE):
        found[name] = set(re.findall(r"(\w+)=", labels))
    return found


def _vllm_metrics() -> set[str]:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    text = Path(spec.origin).with_name("v1").joinpath("metrics", "loggers.py").read_text()
    names = set(re.findall(r'name="(vllm:\w+)"', text))
    return names | {name + suffix for name in names for suffix in ("_total", "_bucket")}


def series_findings(
    asked: AskedSeries, own: dict[str, set[str]], of_vllm: set[str]
) -> Iterator[Finding]:
    """Yield a metric that nothing exports, or labels that it does not have.

    Args:
        own: Labels of each metric of banaserve, by the name of its samples.
        of_vllm: Names of vLLM's metrics, which get labels on the way: the instance's id, and the
            leg where they are of requests.
    """
    is_vllm = asked.metric.startswith("vllm:")
    if asked.metric not in (of_vllm if is_vllm else own):
        yield at(PATH, asked.metric, f"{asked.panel}: nothing exports {asked.metric}")
        return
    labels = {"instance_id", "leg"} if is_vllm else own[asked.metric]
    unknown = asked.labels - labels
    if unknown:
        words = f"{asked.panel}: {asked.metric} has no label {', '.join(sorted(unknown))}"
        yield at(PATH, asked.metric, words)


def _rows() -> Iterator[Finding]:
    in_row: dict[str, set[str]] = {}
    name = ""
    for panel in DASHBOARD["panels"]:
        if panel["type"] == "row":
            name = panel["title"]
        else:
            in_row.setdefault(name, set()).add(panel["title"])
    for row, wanted in ROWS.items():
        shown = {one.metric for one in asked_series() if one.panel in in_row.get(row, ())}
        for metric in sorted(wanted - shown):
            yield at(PATH, f'"{row}"', f"row {row} does not show {metric}")


# Panels -------------------------------------------------------------------------------------------


def panel_findings(panel: dict[str, Any]) -> Iterator[Finding]:
    """Yield queries that Prometheus refuses, and counters that are not looked at over a time."""
    title = panel["title"]
    references = [target["refId"] for target in panel["targets"]]
    if not references or len(references) != len(set(references)):
        yield at(PATH, f'"{title}"', f"{title}: queries need names of their own")
    for target in panel["targets"]:
        query = target["expr"]
        try:
            parsed(query)
        except ValueError as error:
            yield at(PATH, f'"{title}"', f"{title}: {error}")
        # A counter that is not looked at over a time only grows.
        if "_total" in query and not re.search(r"\b(rate|increase)\(", query):
            yield at(PATH, f'"{title}"', f"{title}: a counter without rate or increase")


def layout_findings(shown: list[dict[str, Any]]) -> Iterator[Finding]:
    """Yield panels that overlap, stand out of the page, or have the name of another."""
    taken: set[tuple[int, int]] = set()
    for panel in shown:
        place, title = panel["gridPos"], panel["title"]
        xs = range(place["x"], place["x"] + place["w"])
        cells = {(x, y) for x in xs for y in range(place["y"], place["y"] + place["h"])}
        if xs.stop > 24 or cells & taken:
            yield at(PATH, f'"{title}"', f"{title} overlaps another, or the edge")
        taken |= cells
    for name in ("id", "title"):
        found = [panel[name] for panel in shown]
        for one in sorted({one for one in found if found.count(one) > 1}):
            yield at(PATH, f'"{one}"', f"{name} {one} stands twice")


def through_grafana(dashboard: dict[str, Any]) -> Any:
    """Return what is left of a dashboard once Grafana's model has read and written it."""
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()
    return json.loads(JSONEncoder().encode(Dashboard.from_json(dashboard)))


def lost(given: Any, kept: Any, place: str = "") -> list[str]:
    """Return places of what is in ``given`` and not in ``kept``, or otherwise there."""
    if isinstance(given, dict) and isinstance(kept, dict):
        pairs = [(name, one, kept.get(name)) for name, one in given.items()]
    elif isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        pairs = [
            (str(n), one, other) for n, (one, other) in enumerate(zip(given, kept, strict=True))
        ]
    else:
        return [] if given == kept else [place.removeprefix(".")]
    return [found for name, one, other in pairs for found in lost(one, other, f"{place}.{name}")]
