"""Decision log as a sequence of moments that the page can show. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from banaserve.base.errors import UserError
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
from banaserve.frontdoor.page.figures import figures_of
from banaserve.frontdoor.page.records import (
    Figures,
    InstancePanel,
    ModulesAway,
    MoveProgress,
    PageSnapshot,
    ShownLayers,
)

_MAX_LAYERS, _MAX_INSTANCES = 4096, 4096
"""Limits beyond any model or cluster: a page could not draw the counts of a broken log."""
_SETTLED_S = 5.0
"""Time from a step's end until its outcome is in the log, in seconds."""
_DECISIONS_SHOWN, _ENDED_SHOWN = 40, 8


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
        raise UserError(f"{place}: no decision, but {error}") from None
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
        """Return a description of modelled time; empty in real time."""
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
            at_s=at_s,
            num_layers=record.num_layers,
            num_kv_heads=record.num_kv_heads,
            controller=_controller(record, len(known)),
            instances=_panels(record),
            moves=_moves(known, at_s),
            figures=self._figures[last],
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
    is_paused = record.mode == "paused"
    return ControllerStatus(
        state=ControllerState.PAUSED if is_paused else ControllerState.RUNNING,
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
        _status(name, seen, guests.get(name, []), record.left_out.get(name, ""))
        for name, seen in record.instances.items()
    ]


def _status(name: str, seen: Numbers, guests: list[str], left_out: str) -> InstanceStatus:
    return InstanceStatus(
        id=name,
        role=seen.role,
        state="ready",
        inflight_requests=seen.num_running + seen.num_waiting,
        inflight_prefill_tokens=seen.inflight_prefill_tokens,
        compute=seen.compute,
        memory=seen.memory,
        num_running=seen.num_running,
        num_waiting=seen.num_waiting,
        step_s=seen.step_s,
        step_tokens=seen.step_tokens,
        age_s=seen.age_s,
        kv_blocks=seen.num_kv_blocks,
        guest_bytes=seen.guest_bytes,
        away=seen.away,
        guests=guests,
        left_out=left_out,
        gpu_busy_fraction=seen.gpu_busy_fraction,
    )


def _panels(record: DecisionRecord) -> list[InstancePanel]:
    return [
        InstancePanel(
            one,
            [
                ModulesAway(
                    "heads" if placed.heads else "layers",
                    placed.at,
                    words.rpartition(" at ")[0],
                    [ShownLayers(placed.first_layer, placed.end_layer, placed.heads)],
                )
                for placed, words in zip(
                    record.instances[one.id].placements, record.instances[one.id].away, strict=False
                )
            ],
        )
        for one in _statuses(record)
    ]


def _figures(record: DecisionRecord) -> Figures:
    """Return the figures of a decision; a log has no requests, so their rates are None."""
    found = figures_of(_statuses(record), (), record.at_s)
    return msgspec.structs.replace(found, tokens_per_s=None, requests_per_s=None)


def _moves(records: Sequence[DecisionRecord], at_s: float) -> list[MoveProgress]:
    """Return the steps under way at ``at_s``, then the last ended steps."""
    under_way, ended = [], []
    for record in records:
        for number, step in enumerate(record.steps):
            if step.held:
                continue
            result = step.result
            if result is None or result.ended_at_s > at_s:
                seconds = at_s - record.at_s
                under_way.append(_progress(record, number, step, None, seconds))
            else:
                ended.append(_progress(record, number, step, result, result.seconds))
    return [*under_way, *ended[-_ENDED_SHOWN:]]


def _progress(
    record: DecisionRecord,
    number: int,
    step: WantedStep,
    result: StepRecord | None,
    seconds: float,
) -> MoveProgress:
    move = step.move
    spans = []
    if move is not None:
        spans.append(ShownLayers(move.first_layer, move.end_layer, move.heads))
    return MoveProgress(
        id=f"#{record.number}.{number + 1}",
        kind=step.kind if move is not None else "other",
        state="running" if result is None else result.ending,
        what=step.what,
        source=move.source if move is not None else "",
        target=move.target if move is not None and move.target != move.source else "",
        phase=f"predicted {step.cost_s:.2g} s" if result is None else "",
        seconds=seconds,
        num_bytes=result.num_bytes if result is not None else 0,
        stall_s=result.stall_s if result is not None else 0.0,
        error=result.reason if result is not None else "",
        spans=spans,
    )
