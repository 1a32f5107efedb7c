"""Chrome trace of a simulation (chrome://tracing, Perfetto): steps, requests, moves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from banaserve.base.errors import UserError
from banaserve.sim.cluster.cluster import SimCluster
from banaserve.sim.request import SimRequest
from banaserve.sim.result import SIMULATED

_REQUESTS, _MOVES, _FIRST_INSTANCE = 0, 1, 2
"""Row numbers within a system."""


class ChromeTrace:
    """Trace of simulated systems; each is shown as a process, each instance as a row.

    Steps that only decode are one span from one change of the batch to the next.
    """

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []
        self._clusters: list[SimCluster] = []

    def watch(self, system: str, cluster: SimCluster) -> None:
        """Record every step of ``cluster``, which has not run yet."""
        self._clusters.append(cluster)
        process = len(self._clusters)
        self._name("process_name", process, 0, f"{system} (simulated)")
        self._name("thread_name", process, _REQUESTS, "requests")
        self._name("thread_name", process, _MOVES, "moves")
        everyone = [i for cell in cluster.cells for i in cell.instances.values()]
        for row, instance in enumerate(everyone, start=_FIRST_INSTANCE):
            self._name("thread_name", process, row, instance.id)
            instance.engine.observe = self._observer(process, row)

    def write(self, path: Path) -> None:
        """Write all events so far.

        Raises:
            UserError: The file cannot be written.
        """
        events = list(self._events)
        for process, cluster in enumerate(self._clusters, start=1):
            for cell in cluster.cells:
                events += [_move(process, *move) for move in cell.placing.spans()]
            for request in cluster.finished:
                events += _request(process, request)
        told = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"time": SIMULATED}}
        try:
            path.write_text(json.dumps(told, separators=(",", ":")), encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror or error}") from error

    def _name(self, what: str, process: int, row: int, name: str) -> None:
        self._events.append(
            {"ph": "M", "name": what, "pid": process, "tid": row, "args": {"name": name}}
        )

    def _observer(self, process: int, row: int) -> Callable[[float, float, int, int, int], None]:
        def observe(start_s: float, took_s: float, steps: int, batch: int, tokens: int) -> None:
            kind = ("mixed" if batch else "prefill") if tokens else "decode"
            counts = {"steps": steps, "decoding": batch, "prompt_tokens": tokens}
            self._events.append(_span(process, row, kind, start_s, took_s, counts))

        return observe


def _span(
    process: int, row: int, name: str, start_s: float, took_s: float, args: dict[str, Any]
) -> dict[str, Any]:
    times = {"ts": round(start_s * 1e6, 3), "dur": round(took_s * 1e6, 3)}
    return {"ph": "X", "name": name, "pid": process, "tid": row, **times, "args": args}


def _move(process: int, start_s: float, took_s: float, words: str) -> dict[str, Any]:
    return _span(process, _MOVES, words, start_s, took_s, {})


def _request(process: int, request: SimRequest) -> list[dict[str, Any]]:
    """Return two spans, until the first and the last token, that may overlap those of others."""
    base = {"cat": "request", "id": request.id, "pid": process, "tid": _REQUESTS}
    legs = {
        "prompt_tokens": request.prompt_tokens,
        "output_tokens": request.output_tokens,
        "prefill": request.prefill.id,
        "decode": request.decode.id,
    }
    parts = (
        ("first token", request.arrival_s, request.first_s),
        ("decode", request.first_s, request.end_s),
    )
    events = []
    for name, start_s, end_s in parts:
        events.append({**base, "ph": "b", "name": name, "ts": round(start_s * 1e6, 3)})
        events.append({**base, "ph": "e", "name": name, "ts": round(end_s * 1e6, 3)})
    events[0]["args"] = legs
    return events
