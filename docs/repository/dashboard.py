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
from typing import Any, NamedTuple

from docs import reference
from docs.repository.findings import ROOT, Finding, at, too_few

PATH = ROOT / "docker" / "grafana" / "dashboards" / "banaserve.json"
DASHBOARD: dict[str, Any] = json.loads(PATH.read_text())


class AskedSeries(NamedTuple):
    """A metric that a panel asks for.

    Attributes:
        metric: The name of its samples, with its ending.
        labels: Labels that the query names, of this metric or of what is made of it.
    """

    panel: str
    metric: str
    labels: frozenset[str]


def panels() -> list[dict[str, Any]]:
    """All panels that draw something."""
    return [one for one in DASHBOARD["panels"] if one["type"] != "row"]


def parsed(expression: str) -> Any:
    """The query; raises where Prometheus would refuse it."""
    import promql_parser

    return promql_parser.parse(expression.replace("$__rate_interval", "5m"))


def asked_series() -> list[AskedSeries]:
    """Every metric of every query, with the labels that the query and its legend name."""
    found = []
    for panel in panels():
        for target in panel["targets"]:
            named = _words(r"\bon\s*\(([^)]*)\)", target["expr"])
            # What is joined on one of two metrics is a label of that one alone.
            if "group_left" not in target["expr"]:
                named |= _words(r"{{\s*(\w+)\s*}}", target["legendFormat"])
                named |= _words(r"\bby\s*\(([^)]*)\)", target["expr"])
            for metric, matched in _selectors(parsed(target["expr"])):
                labels = frozenset((named | matched) - {"le"})
                found.append(AskedSeries(panel["title"], metric, labels))
    return found


def _words(pattern: str, text: str) -> set[str]:
    return {word for found in re.findall(pattern, text) for word in re.findall(r"\w+", found)}


def _selectors(node: Any) -> Iterator[tuple[str, set[str]]]:
    import promql_parser

    if isinstance(node, promql_parser.VectorSelector):
        yield node.name or "", {one.name for one in node.matchers.matchers}
        return
    for name in ("expr", "lhs", "rhs", "vector_selector", "vs"):
        child = getattr(node, name, None)
        if child is not None and not isinstance(child, str):
            yield from _selectors(child)
    for child in getattr(node, "args", None) or ():
        yield from _selectors(child)


def findings() -> Iterator[Finding]:
    """Yield queries of nothing, panels that cannot be read, and what Grafana would drop."""
    for panel in panels():
        yield from panel_findings(panel)
    own, of_vllm = _own_labels(), _vllm_metrics()
    series = asked_series()
    yield from too_few(PATH, {one.metric for one in series}, 50, "metrics")
    for one in series:
        yield from series_findings(one, own, of_vllm)
    for place in lost(DASHBOARD, through_grafana(DASHBOARD)):
        yield Finding(PATH, 1, f"Grafana's model has no {place}")


# Metrics ------------------------------------------------------------------------------------------


def _own_labels() -> dict[str, set[str]]:
    """Labels of each metric of banaserve, by the name of its samples."""
    found: dict[str, set[str]] = {"banaserve_kvstore_up": set()}
    for one in reference.metrics():
        for ending in ("_bucket", "_sum", "_count") if one.kind == "histogram" else ("",):
            found[one.name + ending] = set(one.labels)
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
