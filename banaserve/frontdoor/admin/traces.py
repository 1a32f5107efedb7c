"""Admin API of single requests: the last requests, and the trace of one."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from banaserve.frontdoor.admin.answers import answer, last_of, not_found, route
from banaserve.serving.tracing.request_log import RequestLog
from banaserve.serving.tracing.trace_collection import TraceCollector


@dataclass(frozen=True, slots=True)
class Traces:
    """The front door's notes of requests, and the collector of the engines' notes."""

    requests: RequestLog
    collector: TraceCollector


def trace_routes(traces: Traces) -> list[Route]:
    # A client may choose the id, which may contain slashes.
    return [route("/traces", _list, traces), route("/traces/{id:path}", _show, traces)]


async def _list(traces: Traces, request: Request) -> Response:
    """Return the last requests, the oldest first; ``?last=20``: only the last 20."""
    return answer(traces.requests.last(last_of(request)))


async def _show(traces: Traces, request: Request) -> Response:
    notes = traces.requests.find(request.path_params["id"])
    if notes is None:
        return not_found("request", request)
    return answer(await traces.collector.trace_of(notes))
