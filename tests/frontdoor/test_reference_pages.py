"""The reference pages have every route of the admin API and every metric."""

from __future__ import annotations

import re
from pathlib import Path

from docs import reference

ROOT = Path(__file__).parents[2]


def test_the_admin_page_has_every_route_and_its_types() -> None:
    assert reference.admin_routes() == set(reference.OPERATIONS)
    document = reference.openapi()
    told = {(m.upper(), path) for path, ops in document["paths"].items() for m in ops}
    assert told == {(m, path.replace(":path", "")) for m, path in reference.OPERATIONS}
    named = re.findall(r"#/components/schemas/(\w+)", str(document))
    assert "Migration" in named
    assert set(named) <= set(document["components"]["schemas"])


def test_the_metrics_page_has_every_metric() -> None:
    text = reference.metrics_page()
    dashboard = ROOT / "docker" / "grafana" / "dashboards" / "banaserve.json"
    shown = set(re.findall(r"\bbanaserve_\w+", dashboard.read_text()))
    exported = set()
    for path in (ROOT / "banaserve").rglob("*.py"):
        made = r"(?:Counter|Gauge|Histogram|MetricFamily)\(\s*\"(banaserve_\w+)"
        exported |= set(re.findall(made, path.read_text()))
    assert len(exported) > 30
    for name in shown | exported:
        assert re.sub(r"_(total|bucket|sum|count)$", "", name) in text, name
