"""The reference pages have every route of the admin API and every metric."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

from starlette.applications import Starlette
from starlette.routing import Route

from banaserve.frontdoor.admin.app import Traces, admin_app
from banaserve.frontdoor.admin.control import Control
from docs import reference

ROOT = Path(__file__).parents[2]


def _admin_routes() -> set[tuple[str, str]]:
    """Return method and path of every route of the admin API, as the server has them."""
    # The routes' functions ask it only when they are called.
    nothing = cast(Any, Mock())
    control, traces = Control(*[nothing] * 8), Traces(nothing, nothing)
    app = cast(Starlette, admin_app(nothing, control, traces, nothing))
    return {
        (method, route.path)
        for route in app.routes
        if isinstance(route, Route)
        for method in route.methods or ()
        if method != "HEAD"
    }


def test_the_admin_page_has_every_route_and_its_types() -> None:
    assert _admin_routes() == set(reference.OPERATIONS)
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
