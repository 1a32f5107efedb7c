"""Metrics of the times of whole requests: first token and end."""

from __future__ import annotations

from banaserve.serving.monitoring import metrics
from banaserve.serving.tracing.request_log import RequestNotes

_ENDS = frozenset({"stop", "length", "closed", "error"})


def observe(notes: RequestNotes) -> None:
    """Count a request that has ended; its trace becomes the exemplar of its buckets."""
    assert notes.ended is not None
    ended_s, end = notes.ended
    exemplar = notes.span.exemplar if notes.span is not None else None
    if notes.first_token_s is not None:
        metrics.TTFT_S.observe(notes.first_token_s - notes.arrived_s, exemplar)
    how = end.how if end.how in _ENDS else "other"
    metrics.LATENCY_S.labels(how).observe(ended_s - notes.arrived_s, exemplar)
