"""Queries of the dashboard that ships, read by a parser of Prometheus' language."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from docs.check import ROOT

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
