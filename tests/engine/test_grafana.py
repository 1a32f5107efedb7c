"""The dashboard: of Grafana's own model, and its queries find what banaserve exports.

A Grafana to load it into is not among what can be installed by name here; its makers' model of a
dashboard (``grafana-foundation-sdk``) and a parser of Prometheus' language are.
"""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.registry import REGISTRY

from banaserve.controller import metrics as of_the_loop  # noqa: F401  (registers its families)
from banaserve.engine.vllm.monitoring import metrics  # noqa: F401
from banaserve.kvstore.daemon.metrics import prometheus_text
from banaserve.kvstore.stats import StoreStats, TierReport
from banaserve.kvstore.tiers.interface import TierStats
from grafana_dashboard import DASHBOARD, PATH, asked_series, panels, parsed

ENDINGS = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"], "gauge": [""]}


def own_labels() -> dict[str, set[str]]:
    """Labels of each metric of banaserve, by the name of its samples."""
    found: dict[str, set[str]] = {}
    for collector in REGISTRY._collector_to_names:
        labels = set(getattr(collector, "_labelnames", ()))
        if not getattr(collector, "_name", "").startswith("banaserve_"):
            continue
        for ending in ENDINGS[collector._type]:
            found[collector._name + ending] = labels
    return found | store_labels()


def store_labels() -> dict[str, set[str]]:
    tier = TierReport(stats=TierStats(**dict.fromkeys(TierStats.__struct_fields__, 0)))
    numbers = dict.fromkeys(StoreStats.__struct_fields__, 0)
    text = prometheus_text(StoreStats(**{**numbers, "tiers": (tier,)}))
    found = {"banaserve_kvstore_up": set()}
    for name, labels in re.findall(r"^(banaserve_\w+)(\{.*\})? ", text, re.MULTILINE):
        found[name] = set(re.findall(r"(\w+)=", labels))
    return found


def vllm_metrics() -> set[str]:
    package = Path(importlib.util.find_spec("vllm").origin).parent
    text = (package / "v1" / "metrics" / "loggers.py").read_text()
    names = set(re.findall(r'name="(vllm:\w+)"', text))
    return names | {name + suffix for name in names for suffix in ("_total", "_bucket")}


def test_every_metric_of_the_dashboard_exists_with_its_labels() -> None:
    own, of_vllm = own_labels(), vllm_metrics()
    series = asked_series()
    assert len({one.metric for one in series}) > 50
    for one in series:
        if one.metric.startswith("vllm:"):
            assert one.metric in of_vllm, one
            # The front door adds the instance to what engines export.
            assert one.labels <= {"instance_id"}, one
        else:
            assert one.metric in own, one
            assert one.labels <= own[one.metric], one


@pytest.mark.parametrize(
    ("row", "metrics_of_it"),
    [
        ("Roles", {"banaserve_instance_ready", "banaserve_orchestrator_steps_total"}),
        (
            "Orchestrator",
            {
                "banaserve_orchestrator_decisions_total",
                "banaserve_orchestrator_held_total",
                "banaserve_orchestrator_rejected_total",
                "banaserve_orchestrator_cost_error_fraction",
            },
        ),
        (
            "Survival",
            {
                "banaserve_instance_restarts_total",
                "banaserve_streams_resumed_total",
                "banaserve_streams_moved_total",
                "banaserve_streams_broken_total",
                "banaserve_requests_given_up_total",
            },
        ),
        ("Nodes", {"banaserve_node_round_trip_seconds", "banaserve_node_bytes_per_second"}),
    ],
)
def test_what_an_operator_asks_is_in_its_row(row: str, metrics_of_it: set[str]) -> None:
    in_row: dict[str, set[str]] = {}
    name = ""
    for panel in DASHBOARD["panels"]:
        if panel["type"] == "row":
            name = panel["title"]
        else:
            in_row.setdefault(name, set()).add(panel["title"])
    shown = {one.metric for one in asked_series() if one.panel in in_row[row]}
    assert metrics_of_it <= shown


def test_queries_are_what_prometheus_reads() -> None:
    for panel in panels():
        references = [target["refId"] for target in panel["targets"]]
        assert len(references) == len(set(references)) > 0, panel["title"]
        for target in panel["targets"]:
            parsed(target["expr"])
            # A counter that is not looked at over a time only grows.
            if "_total" in target["expr"]:
                assert re.search(r"\b(rate|increase)\(", target["expr"]), target["expr"]
    with pytest.raises(ValueError, match="unclosed"):
        parsed("sum by (le (rate(x[5m]))")


def test_the_dashboard_is_of_grafanas_model() -> None:
    """What the model does not know is lost on the way through it."""
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()

    def through(dashboard: dict[str, Any]) -> Any:
        return json.loads(JSONEncoder().encode(Dashboard.from_json(dashboard)))

    assert lost(DASHBOARD, through(DASHBOARD)) == []
    broken = json.loads(PATH.read_text())
    broken["panels"][1]["gridPosition"] = broken["panels"][1].pop("gridPos")
    assert lost(broken, through(broken)) == ["panels.1.gridPosition"]


def lost(given: Any, kept: Any, place: str = "") -> list[str]:
    """Places of what is in ``given`` and not in ``kept``, or otherwise there."""
    if isinstance(given, dict) and isinstance(kept, dict):
        pairs = [(name, one, kept.get(name)) for name, one in given.items()]
    elif isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        pairs = [
            (str(n), one, other) for n, (one, other) in enumerate(zip(given, kept, strict=False))
        ]
    else:
        return [] if given == kept else [place.removeprefix(".")]
    return [found for name, one, other in pairs for found in lost(one, other, f"{place}.{name}")]


def test_panels_do_not_overlap_and_have_names_of_their_own() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
    for name in ("id", "title"):
        found = [panel[name] for panel in DASHBOARD["panels"]]
        assert len(found) == len(set(found)), name
