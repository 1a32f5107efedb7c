"""Decision log as a sequence of moments, and the page that shows them on this machine only."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from starlette.applications import Starlette
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from banaserve.base.errors import UserError
from banaserve.base.text.records import unpacked
from banaserve.contracts.control_api import (
    DECISION_LOG_VERSION,
    ControllerState,
    ControllerStatus,
    DecisionRecord,
    InstanceStatus,
    Numbers,
    StepRecord,
    WantedStep,
)
from banaserve.frontdoor.page.files import SECURITY_HEADERS
from banaserve.frontdoor.page.page import PageMiddleware, json_response
from banaserve.frontdoor.page.records import (
    Figures,
    InstancePanel,
    ModulesAway,
    MoveProgress,
    PageInfo,
    PageSnapshot,
    ShownLayers,
)
from banaserve.frontdoor.page.snapshot import figures_of

_MAX_LAYERS, _MAX_INSTANCES = 4096, 4096
"""Limits beyond any model or cluster: a page could not draw the counts of a broken log."""
_SETTLED_S = 5.0
"""Time from a step's end until its outcome is in the log, in seconds."""
_DECISIONS_SHOWN, _ENDED_SHOWN = 40, 8
_HOSTS = ["127.0.0.1", "localhost", "[::1]"]
"""Accepted host names: a site whose name resolves to this machine must not read the log."""
_RUNNING = "running"
_SAME = {*Numbers.__struct_fields__} & {*InstanceStatus.__struct_fields__}


class _Version(msgspec.Struct):
    version: int = 0


class ReplayMoment(msgspec.Struct, frozen=True):
    """State that was known at one moment of a log.

    Attributes:
        decisions: Last decisions, the oldest first.
    """

    frame: int
    snapshot: PageSnapshot
    decisions: list[DecisionRecord]


class ReplayMark(msgspec.Struct, frozen=True):
    """A moment at which a step began or ended, for the slider."""

    frame: int
    what: str


class ReplayIndex(msgspec.Struct, frozen=True):
    """All moments of a log.

    Attributes:
        at_s: Time of each moment, ascending, in seconds since 1970.
        series: Figures of each moment, by name.
    """

    at_s: list[float]
    series: dict[str, list[float | None]]
    marks: list[ReplayMark]


class _Frame(NamedTuple):
    at_s: float
    record: int
    what: str


def read_decisions(lines: Iterable[bytes], name: str) -> list[DecisionRecord]:
    """Return the decisions of a log, each once, in its last written state.

    Args:
        lines: Lines of the log without line ends, without an incomplete last line.
        name: Name of the file, for errors.

    Raises:
        UserError: A line is no decision or has another version, or there are no decisions.
    """
    found: dict[tuple[int, int], DecisionRecord] = {}
    run, newest = 0, 0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        record = _decoded(line, f"{name}, line {number}")
        known = found.get((run, record.number))
        if record.number <= newest and (known is None or known.at_s != record.at_s):
            run, newest = run + 1, 0  # another server has appended to the file
        found[(run, record.number)] = record
        newest = max(newest, record.number)
    if not found:
        raise UserError(f"{name} holds no decisions: `serve --decision-log FILE` writes them")
    records = sorted(found.values(), key=lambda one: one.at_s)
    if run:
        for number, record in enumerate(records, start=1):
            record.number = number
    return records


def _decoded(line: bytes, place: str) -> DecisionRecord:
    try:
        version = msgspec.json.decode(line, type=_Version).version
        if version != DECISION_LOG_VERSION:
            shown = f"version {version}" if version else "a log without a version"
            raise UserError(
                f"{place}: of {shown}, while this banaserve reads version {DECISION_LOG_VERSION}: "
                "use the one that wrote it"
            )
        record = msgspec.json.decode(line, type=DecisionRecord)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{place}: not a decision: {error}") from None
    if not 0 <= record.num_layers <= _MAX_LAYERS or len(record.instances) > _MAX_INSTANCES:
        raise UserError(
            f"{place}: {record.num_layers} layers and {len(record.instances)} instances are more "
            "than a page can draw"
        )
    return record


class Replay:
    """Moments of a log.

    Args:
        records: Decisions in the order of time, at least one.
    """

    def __init__(self, records: Sequence[DecisionRecord]) -> None:
        self._records = records
        self._at_s = [one.at_s for one in records]
        self._figures = [_figures(one) for one in records]
        frames = [_Frame(one.at_s, i, _began(one)) for i, one in enumerate(records)]
        for i, one in enumerate(records):
            frames += [
                _Frame(result.ended_at_s, i, f"{result.ending}: {step.what}")
                for step, result in _results(one)
            ]
        self._frames = sorted(frames)

    @property
    def num_frames(self) -> int:
        return len(self._frames)

    @property
    def time(self) -> str:
        """Description of modelled time; empty in real time."""
        return self._records[-1].time

    def index(self) -> ReplayIndex:
        """Return all moments with their figures."""
        seen = [self._figures[self._last(frame.at_s)] for frame in self._frames]
        series = {name: [getattr(one, name) for one in seen] for name in Figures.__struct_fields__}
        marks = [ReplayMark(i, frame.what) for i, frame in enumerate(self._frames) if frame.what]
        return ReplayIndex([frame.at_s for frame in self._frames], series, marks)

    def moment(self, frame: int) -> ReplayMoment:
        """Return the state that was known at a frame, counted from 0.

        Raises:
            IndexError: There is no such frame.
        """
        if not 0 <= frame < len(self._frames):
            raise IndexError(frame)
        at_s = self._frames[frame].at_s
        last = self._last(at_s)
        known = self._records[: last + 1]
        shown = [_as_of(one, at_s) for one in known[-_DECISIONS_SHOWN:]]
        record = self._records[last]
        snapshot = PageSnapshot(
            at_s,
            record.num_layers,
            record.num_kv_heads,
            _controller(record, len(known)),
            _panels(record),
            _moves(known, at_s),
            self._figures[last],
        )
        return ReplayMoment(frame, snapshot, shown)

    def _last(self, at_s: float) -> int:
        """Return the index of the last decision that had been made by ``at_s``."""
        return max(0, bisect_right(self._at_s, at_s) - 1)


def _began(record: DecisionRecord) -> str:
    return "; ".join(step.what for step in record.steps if not step.held)


def _results(record: DecisionRecord) -> Iterator[tuple[WantedStep, StepRecord]]:
    for step in record.steps:
        if step.result is not None and step.result.ended_at_s >= record.at_s:
            yield step, step.result


def _as_of(record: DecisionRecord, at_s: float) -> DecisionRecord:
    """Return a decision without results that were not known at ``at_s``."""
    steps = []
    for step in record.steps:
        result = step.result
        if result is not None and result.ended_at_s > at_s:
            result = None
        elif result is not None and result.ended_at_s + _SETTLED_S > at_s:
            result = msgspec.structs.replace(result, changed={})
        steps.append(msgspec.structs.replace(step, result=result))
    return msgspec.structs.replace(record, steps=steps)


def _controller(record: DecisionRecord, num_decisions: int) -> ControllerStatus:
    return ControllerStatus(
        state=ControllerState("paused" if record.mode == "paused" else "running"),
        mode=record.mode,
        policy=record.policy,
        interval_s=0.0,
        num_decisions=num_decisions,
        last_at_s=record.at_s,
        gap=record.gap,
        reason=record.reason,
        left_out=record.left_out,
    )


def _statuses(record: DecisionRecord) -> list[InstanceStatus]:
    guests: dict[str, list[str]] = {}
    for host, seen in record.instances.items():
        for words in seen.away:
            module, _, at = words.rpartition(" at ")
            guests.setdefault(at, []).append(f"{module} of {host}")
    return [
        InstanceStatus(
            id=name,
            state="ready",
            inflight_requests=seen.num_running + seen.num_waiting,
            kv_blocks=seen.num_kv_blocks,
            guests=guests.get(name, []),
            left_out=record.left_out.get(name, ""),
            **{field: getattr(seen, field) for field in _SAME},
        )
        for name, seen in record.instances.items()
    ]


def _panels(record: DecisionRecord) -> list[InstancePanel]:
    panels = []
    for one in _statuses(record):
        seen = record.instances[one.id]
        away = [
            ModulesAway(
                "heads" if placed.heads else "layers",
                placed.at,
                words.rpartition(" at ")[0],
                [ShownLayers(placed.first_layer, placed.end_layer, placed.heads)],
            )
            for placed, words in zip(seen.placements, seen.away, strict=False)
        ]
        panels.append(InstancePanel(one, away))
    return panels


def _figures(record: DecisionRecord) -> Figures:
    """Return the figures of a decision; a log has no requests, so their rates are None."""
    found = figures_of(_statuses(record), (), record.at_s)
    return msgspec.structs.replace(found, tokens_per_s=None, requests_per_s=None)


def _moves(records: Sequence[DecisionRecord], at_s: float) -> list[MoveProgress]:
    """Return the steps under way at ``at_s``, then the last ended steps."""
    moves = [
        _progress(f"#{record.number}.{number}", record.at_s, step, at_s)
        for record in records
        for number, step in enumerate(record.steps, start=1)
        if not step.held
    ]
    under_way = [one for one in moves if one.state == _RUNNING]
    return [*under_way, *[one for one in moves if one.state != _RUNNING][-_ENDED_SHOWN:]]


def _progress(name: str, began_s: float, step: WantedStep, at_s: float) -> MoveProgress:
    move, result = step.move, step.result
    source = target = ""
    spans = []
    if move is not None:
        source, target = move.source, move.target if move.target != move.source else ""
        spans.append(ShownLayers(move.first_layer, move.end_layer, move.heads))
    known = MoveProgress(
        id=name,
        kind=step.kind if move is not None else "other",
        state=_RUNNING,
        what=step.what,
        source=source,
        target=target,
        phase=f"predicted {step.cost_s:.2g} s",
        seconds=at_s - began_s,
        spans=spans,
    )
    if result is None or result.ended_at_s > at_s:
        return known
    return msgspec.structs.replace(
        known,
        state=result.ending,
        phase="",
        seconds=result.seconds,
        num_bytes=result.num_bytes,
        stall_s=result.stall_s,
        error=result.reason,
    )


def read_replay(path: Path) -> Replay:
    """Return the moments of a decision log, which may be compressed with zstd.

    Raises:
        UserError: The file cannot be read, or is no decision log.
    """
    lines = unpacked(path).split(b"\n")
    # A last line without a line end is still being written, or its writer was killed.
    return Replay(read_decisions(lines[:-1] if len(lines) > 1 else lines, str(path)))


def replay_app(replay: Replay, title: str) -> ASGIApp:
    """Return an application with the page, and the moments of ``replay`` under ``/replay``."""
    index = msgspec.json.encode(replay.index())

    async def answer_index(_: Request) -> Response:
        return json_response(index)

    async def answer_moment(request: Request) -> Response:
        given = request.query_params.get("frame", "")
        is_number = given.isascii() and given.isdigit() and len(given) < 10
        if not is_number or int(given) >= replay.num_frames:
            return Response("there is no such moment\n", 404, SECURITY_HEADERS, "text/plain")
        return json_response(msgspec.json.encode(replay.moment(int(given))))

    routes = [
        Route("/replay/index.json", answer_index),
        Route("/replay/moment.json", answer_moment),
    ]
    page = PageMiddleware(Starlette(routes=routes), PageInfo("replay", title, replay.time))
    return TrustedHostMiddleware(page, _HOSTS)
