"""Spans of a request's time as rows: the waterfall that ``banaserve trace ID`` prints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from banaserve.contracts.trace_events import TraceSpan

HEADING = ("PART", "FROM", "MS", "PROCESS", "TIMELINE", "ABOUT")
_COLUMNS = 32
_TOLD_MS = 0.05
"""Minimum length of a span without child spans, in milliseconds; shorter ones are left out."""


def span_rows(spans: Sequence[TraceSpan]) -> list[tuple[str, ...]]:
    """Return a heading, and a row for each span, below its parent; no rows without spans.

    Bars are on one scale, from the beginning of the first span to the end of the last.
    """
    if not spans:
        return []
    first_s = min(one.start_s for one in spans)
    took_s = max(one.end_s for one in spans) - first_s
    rows: list[tuple[str, ...]] = [HEADING]
    for index, depth in _in_order(spans):
        one = spans[index]
        has_parts = any(other.parent == index for other in spans)
        if 1e3 * one.took_s < _TOLD_MS and not has_parts and not one.error:
            continue
        rows.append(
            (
                "  " * depth + one.name,
                f"{1e3 * one.start_s:.1f}",
                f"{1e3 * one.took_s:.1f}",
                one.process,
                _bar(one.start_s - first_s, one.end_s - first_s, took_s),
                ", ".join(_about(one)),
            )
        )
    return rows


def _in_order(
    spans: Sequence[TraceSpan], parent: int = -1, depth: int = 0
) -> Iterator[tuple[int, int]]:
    """Yield index and depth of spans by their beginning, each followed by its child spans."""
    own = [index for index, one in enumerate(spans) if one.parent == parent]
    for index in sorted(own, key=lambda index: spans[index].start_s):
        yield index, depth
        yield from _in_order(spans, index, depth + 1)


def _bar(start_s: float, end_s: float, took_s: float) -> str:
    if took_s <= 0:
        return ""
    first = min(_COLUMNS - 1, round(_COLUMNS * start_s / took_s))
    last = max(first + 1, round(_COLUMNS * end_s / took_s))
    return " " * first + "█" * (last - first)


def _about(one: TraceSpan) -> list[str]:
    words = [
        f"{name.replace('_', ' ')} {round(value, 1) if isinstance(value, float) else value}"
        for name, value in one.attributes.items()
    ]
    return [one.error, *words] if one.error else words
