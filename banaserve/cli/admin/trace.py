"""``banaserve trace``: the path of one request through front door and engines.

The output shows first the spans of the request's time, then every event.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from banaserve.base.arguments import AT_LEAST_1, argument, option
from banaserve.base.text.printable import printable
from banaserve.cli.admin.options import JsonOptions
from banaserve.cli.app import App
from banaserve.cli.terminal.console import Columns, print_json, print_rows, rows_of
from banaserve.contracts import trace_events as events

_COLUMNS: Columns[events.RequestSummary] = {
    "REQUEST": lambda one: one.id,
    "ARRIVED": lambda one: _at(one),
    "PROMPT": lambda one: str(one.prompt_tokens),
    "OUTPUT": lambda one: str(one.output_tokens),
    "INSTANCES": lambda one: ", ".join(one.instances) or "-",
    "TTFT": lambda one: "-" if one.ttft_s is None else f"{_ms(one.ttft_s)} ms",
    "TOOK": lambda one: f"{_ms(one.took_s)} ms",
    "END": lambda one: one.end or "under way",
}
_HEADING = ("MS", "PROCESS", "EVENT")
_SPAN_HEADING = ("PART", "FROM", "MS", "PROCESS", "TIMELINE", "ABOUT")
_BAR_COLUMNS = 32
_TOLD_MS = 0.05
"""Minimum length of a span without child spans, in milliseconds; shorter ones are left out."""
STYLES = {
    "error": "red",
    "closed": "yellow",
    "under way": "cyan",
    **dict.fromkeys((*_COLUMNS, *_HEADING, *_SPAN_HEADING), "bold"),
}


def trace(
    asked: JsonOptions,
    request_id: str | None = argument(
        "the answer's id or the X-Request-Id that was sent, or its beginning, or the id of its "
        "OpenTelemetry trace; without it the last requests are listed",
        None,
    ),
    last: int = option("number of the last requests to list", 20, rule=AT_LEAST_1),
) -> None:
    """Show the path of one request through the processes, or list the last requests."""
    client = asked.client()
    if request_id is None:
        _print_list(client.requests(last), asked.as_json)
        return
    found = client.trace(request_id)
    if asked.as_json:
        print_json(found)
        return
    print(printable(heading(found.summary)))
    if rows := span_rows(found.spans):
        print_rows(rows, STYLES)
        print()
    print_rows(trace_rows(found), STYLES)
    for line in found.missing:
        print(f"not known: {line}")


def _print_list(found: list[events.RequestSummary], as_json: bool) -> None:
    if as_json:
        print_json(found, None)
    elif found:
        print_rows(list_rows(found), STYLES)
    else:
        print("the server has had no request so far")


def list_rows(found: list[events.RequestSummary]) -> list[tuple[str, ...]]:
    """Return a heading, and a row for each request."""
    return rows_of(_COLUMNS, found)


def heading(one: events.RequestSummary) -> str:
    """Return the request in one line."""
    line = f"{one.id}: arrived at {_at(one)}, {_count(one.prompt_tokens, 'prompt token')}, "
    line += f"{_count(one.output_tokens, 'output token')}, "
    if one.ttft_s is not None:
        line += f"first after {_ms(one.ttft_s)} ms, "
    if one.trace_id:
        line += f"trace {one.trace_id}, "
    return line + (f"{one.end} after {_ms(one.took_s)} ms" if one.end else "under way")


def trace_rows(found: events.RequestTrace) -> list[tuple[str, ...]]:
    """Return a heading, and a row for each event."""
    width = max((len(_ms(line.at_s)) for line in found.lines), default=0)
    rows = [
        (f"{_ms(line.at_s):>{width}}", line.process, "; ".join(parts_of(line.event)))
        for line in found.lines
    ]
    return [_HEADING, *rows]


def parts_of(event: events.RequestEvent) -> Iterator[str]:
    """Yield the phrases that describe an event."""
    match event:
        case events.Prepared():
            yield "body read, rendered and tokenised"
        case events.LookedUp():
            yield f"store asked for the router: {_count(event.cached_tokens, 'token')} cached"
            yield f"took {_ms(event.took_s)} ms"
        case events.NoInstance():
            yield f"waits for an instance: {event.why}"
        case events.Routed():
            yield from _routed(event)
        case events.LegBegan():
            yield f"{event.leg} leg sent to {event.instance} as {event.engine_request_id}"
            if event.resumed_tokens:
                yield f"goes on after {_count(event.resumed_tokens, 'output token')}"
        case events.LegOutput():
            yield f"{event.leg} leg: first output of {event.instance}'s own"
        case events.LegEnded():
            yield f"{event.leg} leg ended on {event.instance}: {event.finish_reason}"
            if event.cached_tokens is not None:
                yield f"{_count(event.cached_tokens, 'prompt token')} cached"
        case events.LegFailed():
            yield f"{event.leg} leg failed on {event.instance}: {event.why}"
            yield event.next_step
        case events.FirstToken():
            yield f"first token of the answer, from {event.source}"
            if event.blocker is not None:
                yield f"prefill's could not be used: {event.blocker}"
        case events.RequestEnded():
            yield f"request ended: {event.how}, {_count(event.output_tokens, 'output token')}"
            if event.error:
                yield event.error
        case events.MoveCommitted():
            yield f"{event.modules} of {event.instance} moved to {event.to or 'home'}"
            yield f"its steps stood still for {_ms(event.stall_s)} ms"
        case events.EngineReceived():
            yield f"scheduler has it: {_count(event.prompt_tokens, 'prompt token')}"
            if event.leaves_tail:
                yield "prefill leg, all of its KV is to be saved"
            if event.handed_over_tokens is not None:
                yield f"hand-over: {_count(event.handed_over_tokens, 'token')} lie in the store"
        case events.StoreAsked():
            found = f"{event.found_blocks} of {_count(event.asked_blocks, 'block')} found"
            yield f"store asked: {found}, {event.ready_blocks} readable"
            yield f"{_count(event.reserved_blocks, 'block')} reserved for saving"
            yield f"took {_ms(event.took_s)} ms"
            if event.is_undecided:
                yield "a tier could not say yet"
        case events.PromotionEnded():
            arrived = f"{event.arrived_blocks} of {_count(event.pending_blocks, 'block')}"
            yield f"waited {_ms(event.wait_s)} ms for a tier: {event.outcome}, {arrived}"
            yield f"{_ms(event.predicted_s)} ms predicted"
        case events.GateDecided():
            work = f"{_count(event.blocks, 'block')}, {_count(event.tokens, 'token')}"
            if 0 < event.fetched_blocks < event.blocks:
                yield f"cost gate: fetch {event.fetched_blocks} of {work} ({event.decision})"
            else:
                verdict = "fetch" if event.fetched_blocks else "compute"
                yield f"cost gate: {verdict} {work} ({event.decision})"
            if event.fetch_s is not None and event.compute_s is not None:
                yield f"predicted {_ms(event.fetch_s)} ms against {_ms(event.compute_s)} ms"
            if event.step_s is not None:
                yield f"step of {_ms(event.step_s)} ms"
        case events.StepsPlanned():
            yield from _steps(event)
        case events.CopiesEnded():
            yield from _copies(event)
        case events.EngineFinished():
            yield f"scheduler lets it go: {_count(event.output_tokens, 'output token')}"


def _routed(event: events.Routed) -> Iterator[str]:
    ways = [name for name in (event.prefill, event.decode) if name is not None]
    why = event.reason
    if event.split_blocker is not None:
        why += f", it cannot be split: {event.split_blocker}"
    yield f"routed to {' then '.join(ways)} by {event.policy} ({why})"
    for one in event.candidates:
        yield (
            f"{one.instance} ({one.role}) had {_count(one.inflight_requests, 'leg')}, "
            f"{_count(one.inflight_prefill_tokens, 'prompt token')} ahead"
        )


def _steps(event: events.StepsPlanned) -> Iterator[str]:
    if event.num_steps == 1:
        steps = f"step {event.first_step}"
    else:
        steps = f"{event.num_steps} steps from {event.first_step} to {event.last_step}"
    yield f"{event.phase}: {steps}, {_count(event.num_tokens, 'token')}"
    if event.num_steps > 1:
        yield f"over {_ms(event.took_s)} ms, at most {_ms(event.longest_gap_s)} ms apart"
    if event.fetched_blocks:
        yield f"fetches {_count(event.fetched_blocks, 'block')}"
    if event.saved_blocks:
        yield f"saves {_count(event.saved_blocks, 'block')}"


def _copies(event: events.CopiesEnded) -> Iterator[str]:
    computed = "" if event.compute_s is None else f", computed in {_ms(event.compute_s)} ms"
    yield f"step {event.step} ended{computed}"
    if event.fetched_blocks:
        yield f"{_count(event.fetched_blocks, 'block')} fetched in {_ms(event.fetch_s)} ms"
    if event.saved_blocks:
        yield f"{_count(event.saved_blocks, 'block')} saved to the store"
    if event.lost_saves:
        yield f"{_count(event.lost_saves, 'block')} of the step not saved"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _at(one: events.RequestSummary) -> str:
    return time.strftime("%H:%M:%S", time.localtime(one.arrived_at_s))


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"


def span_rows(spans: Sequence[events.TraceSpan]) -> list[tuple[str, ...]]:
    """Return a heading, and a row for each span, below its parent; no rows without spans.

    Bars are on one scale, from the beginning of the first span to the end of the last.
    """
    if not spans:
        return []
    first_s = min(one.start_s for one in spans)
    took_s = max(one.end_s for one in spans) - first_s
    rows: list[tuple[str, ...]] = [_SPAN_HEADING]
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
    spans: Sequence[events.TraceSpan], parent: int = -1, depth: int = 0
) -> Iterator[tuple[int, int]]:
    """Yield index and depth of spans by their beginning, each followed by its child spans."""
    own = [index for index, one in enumerate(spans) if one.parent == parent]
    for index in sorted(own, key=lambda index: spans[index].start_s):
        yield index, depth
        yield from _in_order(spans, index, depth + 1)


def _bar(start_s: float, end_s: float, took_s: float) -> str:
    if took_s <= 0:
        return ""
    first = min(_BAR_COLUMNS - 1, round(_BAR_COLUMNS * start_s / took_s))
    last = max(first + 1, round(_BAR_COLUMNS * end_s / took_s))
    return " " * first + "█" * (last - first)


def _about(one: events.TraceSpan) -> list[str]:
    words = [
        f"{name.replace('_', ' ')} {round(value, 1) if isinstance(value, float) else value}"
        for name, value in one.attributes.items()
    ]
    return [one.error, *words] if one.error else words


app = App(trace)
