"""The admin API's part about single requests: the last ones, and the trace of one."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from banaserve.api.admin_answers import PREFIX, Endpoint, answer, last_of, not_found, refusing
from banaserve.engine.vllm.requests.trace_collection import TraceCollector
from banaserve.engine.vllm.tracing.request_log import RequestLog


@dataclass(frozen=True, slots=True)
class Traces:
    """The front door's notes, and what asks the engines for theirs."""

    requests: RequestLog
    collector: TraceCollector


def trace_routes(traces: Traces) -> list[Route]:
    # A client may choose the id, with slashes too.
    return [
        Route(f"{PREFIX}/traces", _list(traces), methods=["GET"]),
        Route(f"{PREFIX}/traces/{{id:path}}", _show(traces), methods=["GET"]),
    ]


def _list(traces: Traces) -> Endpoint:
    """``?last=20``: so many of the last ones, the oldest first; all that are kept without it."""

    @refusing
    async def requests(request: Request) -> Response:
        return answer(traces.requests.last(last_of(request)))

    return requests


def _show(traces: Traces) -> Endpoint:
    @refusing
    async def trace(request: Request) -> Response:
        notes = traces.requests.find(request.path_params["id"])
        if notes is None:
            return not_found("request", request)
        return answer(await traces.collector.trace_of(notes))

    return trace
