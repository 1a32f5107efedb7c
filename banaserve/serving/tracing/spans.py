"""Parts of a request's time, made from the events of all processes. Pure.

Parts without a parent follow one another without gaps, from the time at which the request's head
was received to the last byte of the answer; each sequence of a request (``n`` > 1) has a row of its
own. Parts that run in parallel, or that only an engine knows of, are children of these.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from banaserve.contracts.trace_events import (
    CopiesEnded,
    EngineReceived,
    GateDecided,
    LegBegan,
    LegEnded,
    LegFailed,
    LegOutput,
    LookedUp,
    MoveCommitted,
    NoInstance,
    Prepared,
    PromotionEnded,
    RequestEnded,
    RequestSummary,
    Routed,
    StepsPlanned,
    TraceLine,
    TraceSpan,
)

FRONT_DOOR = "front door"
_LEG_SUFFIX = re.compile(r"(-m\d+)?(-p)?$")
_LATE_S = 1.0
"""Bound of the time by which an engine's event may follow the end of its leg, in seconds.

A step's end may be reported after the step's output has reached the front door.
"""

Attributes = dict[str, str | int | float]


class SpanName:
    """Names of spans, as all views show them."""

    RECEIVE = "receive"
    PREPARE = "prepare"
    ROUTE = "route"
    LOOKUP = "lookup"
    WAIT = "wait for an instance"
    QUEUE = "queue"
    PROMOTE = "promote"
    PREFILL = "prefill"
    HAND_OVER = "hand-over"
    FETCH = "fetch"
    SAVE = "save"
    DECODE = "decode"
    MOVE = "move"
    RESPOND = "respond"


def spans_of(summary: RequestSummary, lines: Sequence[TraceLine]) -> list[TraceSpan]:
    """Return the parts of a request's time.

    Args:
        lines: Events in the order of time.
    """
    return _Timeline(summary, lines).spans


def accounted_s(spans: Sequence[TraceSpan]) -> float:
    """Return the seconds that spans without a parent cover; overlaps count once."""
    covered_s, until_s = 0.0, float("-inf")
    for one in sorted((s for s in spans if s.parent < 0), key=lambda s: s.start_s):
        covered_s += max(0.0, one.end_s - max(until_s, one.start_s))
        until_s = max(until_s, one.end_s)
    return covered_s


@dataclass(slots=True)
class _LegNotes:
    """Events of a leg that its engine reported, in the order of time.

    Attributes:
        is_known: True if the engine's scheduler has looked at the leg.
    """

    planned: list[tuple[float, StepsPlanned]] = field(default_factory=list)
    copies: list[tuple[float, CopiesEnded]] = field(default_factory=list)
    promotions: list[tuple[float, PromotionEnded]] = field(default_factory=list)
    gate: GateDecided | None = None
    is_known: bool = False

    @property
    def first_s(self) -> float | None:
        """Time at which the engine began to compute the leg; None before that."""
        return self.planned[0][0] if self.planned else None

    def decodes_from_s(self) -> float | None:
        """Return the time at which the first step without prompt tokens was planned, or None."""
        return next((at for at, steps in self.planned if steps.phase == "decode"), None)

    def steps_of(self, phase: str) -> list[StepsPlanned]:
        return [steps for _, steps in self.planned if steps.phase == phase]

    def planned_s(self, step: int) -> float | None:
        """Return the time at which a step that copied was planned; None if it is not known."""
        return next((at_s for at_s, steps in self.planned if steps.first_step == step), None)


@dataclass(slots=True)
class _OpenLeg:
    """A leg that has begun.

    Attributes:
        follows_prefill: True if a prefill leg left the prompt of this leg in the store.
        output_s: Time at which the leg's first own output arrived; None before that.
    """

    began_s: float
    event: LegBegan
    follows_prefill: bool
    output_s: float | None = None


class _Timeline:
    """Spans of one request, built from its events in order."""

    def __init__(self, summary: RequestSummary, lines: Sequence[TraceLine]) -> None:
        self.spans: list[TraceSpan] = []
        self._lines = lines
        self._ends_s = summary.took_s
        if summary.received_s > 0:
            self._add(SpanName.RECEIVE, -summary.received_s, 0.0)
        prepared_s = self._prepared()
        ended_s = max(
            [self._sequence(stem, prepared_s) for stem in self._stems()], default=prepared_s
        )
        if summary.answered_s is not None and summary.answered_s > ended_s:
            self._add(SpanName.RESPOND, ended_s, summary.answered_s)
        elif summary.end and self._ends_s > ended_s:
            self._add(SpanName.RESPOND, ended_s, self._ends_s)

    def _add(
        self,
        name: str,
        start_s: float,
        end_s: float,
        process: str = FRONT_DOOR,
        parent: int = -1,
        error: str = "",
        **attributes: str | int | float | None,
    ) -> int:
        """Add a span and return its index."""
        known: Attributes = {key: value for key, value in attributes.items() if value is not None}
        made = TraceSpan(name, start_s, max(start_s, end_s), process, parent, known, error)
        self.spans.append(made)
        return len(self.spans) - 1

    def _prepared(self) -> float:
        at_s = next((one.at_s for one in self._lines if isinstance(one.event, Prepared)), 0.0)
        if at_s > 0:
            self._add(SpanName.PREPARE, 0.0, at_s)
        return at_s

    # ---- one sequence

    def _stems(self) -> list[str]:
        """Return, for each sequence, the part of the id that all of its legs share."""
        ours = (one.leg_id for one in self._lines if one.process == FRONT_DOOR and one.leg_id)
        return list(dict.fromkeys(_LEG_SUFFIX.sub("", leg_id) for leg_id in ours))

    def _sequence(self, stem: str, prepared_s: float) -> float:
        """Add the spans of a sequence; return the time at which the last of them ends."""
        ours = [
            one
            for one in self._lines
            if one.process == FRONT_DOOR and one.leg_id and _LEG_SUFFIX.sub("", one.leg_id) == stem
        ]
        is_first = stem == self._stems()[0]
        cursor_s = prepared_s if is_first else ours[0].at_s
        leg: _OpenLeg | None = None
        waits_s: float | None = None
        follows_prefill, retries = False, 0
        for one in ours:
            event = one.event
            match event:
                case NoInstance():
                    waits_s = one.at_s
                case Routed():
                    self._route(cursor_s, one.at_s, event, waits_s, retries, is_first)
                    cursor_s, waits_s, is_first = one.at_s, None, False
                case LegBegan():
                    leg = _OpenLeg(one.at_s, event, follows_prefill)
                case LegOutput() if leg is not None and leg.output_s is None:
                    leg.output_s = one.at_s
                case LegEnded() | LegFailed():
                    error = ""
                    if isinstance(event, LegFailed):
                        error, retries = f"{event.why}; {event.next_step}", retries + 1
                    if leg is not None:
                        self._leg(leg, cursor_s, one.at_s, error)
                        cursor_s = one.at_s
                    follows_prefill = isinstance(event, LegEnded) and event.leg == "prefill"
                    leg = None
        if waits_s is not None:
            self._add(SpanName.WAIT, cursor_s, self._end_s())
            return self._end_s()
        if leg is not None:  # under way, or its client has left
            self._leg(leg, cursor_s, self._end_s(), "")
            return self._end_s()
        return cursor_s

    def _end_s(self) -> float:
        """Return the time at which the request ended, or now."""
        ended = (one.at_s for one in self._lines if isinstance(one.event, RequestEnded))
        return next(ended, self._ends_s)

    def _route(
        self,
        start_s: float,
        end_s: float,
        event: Routed,
        waits_s: float | None,
        retries: int,
        with_lookup: bool,
    ) -> None:
        route = self._add(
            SpanName.ROUTE,
            start_s,
            end_s,
            reason=event.reason,
            policy=event.policy,
            prefill_instance=event.prefill,
            decode_instance=event.decode,
            split_blocker=event.split_blocker,
            num_candidates=len(event.candidates),
            retries=retries or None,
        )
        for one in self._lines if with_lookup else ():
            if isinstance(one.event, LookedUp):
                began_s = max(start_s, one.at_s - one.event.took_s)
                tokens = one.event.cached_tokens
                self._add(SpanName.LOOKUP, began_s, one.at_s, parent=route, cached_tokens=tokens)
        if waits_s is not None:
            self._add(SpanName.WAIT, waits_s, end_s, parent=route)

    # ---- one leg

    def _leg(self, leg: _OpenLeg, start_s: float, end_s: float, error: str) -> None:
        """Add the spans of a leg from ``start_s``, the end of the preceding part."""
        told = self._told(leg, end_s)
        name, instance = leg.event.leg, leg.event.instance
        decodes_s = None if name == "prefill" else told.decodes_from_s()
        if decodes_s is None and name != "prefill" and (not told.planned or name == "decode"):
            decodes_s = leg.output_s
        until_s = decodes_s if decodes_s is not None else end_s
        if name == "decode" and (leg.follows_prefill or not leg.event.resumed_tokens):
            parts = self._hand_over(leg, told, start_s, until_s)
        else:
            parts = self._prompt(leg, told, start_s, until_s)
        if decodes_s is not None and end_s > decodes_s:
            parts.append(self._decode(told, instance, decodes_s, end_s))
        if error:
            self.spans[parts[-1]].error = error
        self._copies(told, instance, parts)
        self._felt(instance, start_s, end_s, parts)

    def _hand_over(
        self, leg: _OpenLeg, told: _LegNotes, start_s: float, until_s: float
    ) -> list[int]:
        """Add the span of a hand-over, until the decode leg computes its own output.

        It consists of the leg's wait and of the step that fetches the blocks.
        """
        instance = leg.event.instance
        whole = self._add(SpanName.HAND_OVER, start_s, until_s, instance)
        if told.first_s is not None:
            self._add(SpanName.QUEUE, leg.began_s, told.first_s, instance, parent=whole)
        return [whole]

    def _prompt(self, leg: _OpenLeg, told: _LegNotes, start_s: float, until_s: float) -> list[int]:
        """Add the spans until the prompt, and any output that came with it, has been computed."""
        parts, instance, first_s = [], leg.event.instance, told.first_s
        if first_s is not None or told.is_known:
            queued_s = first_s if first_s is not None else until_s
            parts.append(self._add(SpanName.QUEUE, start_s, queued_s, instance))
        if first_s is not None or not told.is_known:
            steps = told.steps_of("prompt")
            parts.append(
                self._add(
                    SpanName.PREFILL,
                    first_s if first_s is not None else start_s,
                    until_s,
                    instance,
                    tokens=sum(one.num_tokens for one in steps) or None,
                    steps=sum(one.num_steps for one in steps) or None,
                    resumed_tokens=leg.event.resumed_tokens or None,
                    fetch_decision=told.gate.decision if told.gate is not None else None,
                )
            )
        return parts

    def _decode(self, told: _LegNotes, instance: str, start_s: float, end_s: float) -> int:
        steps = told.steps_of("decode")
        return self._add(
            SpanName.DECODE,
            start_s,
            end_s,
            instance,
            tokens=sum(one.num_tokens for one in steps) or None,
            steps=sum(one.num_steps for one in steps) or None,
            longest_gap_ms=max((1e3 * one.longest_gap_s for one in steps), default=None),
            saved_blocks=sum(one.saved_blocks for one in steps) or None,
        )

    def _told(self, leg: _OpenLeg, end_s: float) -> _LegNotes:
        told = _LegNotes()
        name, instance = leg.event.engine_request_id, leg.event.instance
        for one in self._lines:
            at_s, event = one.at_s, one.event
            if one.leg_id != name or one.process != instance:
                continue
            if not leg.began_s <= at_s <= end_s + _LATE_S:
                continue
            match event:
                case EngineReceived():
                    told.is_known = True
                case StepsPlanned() if at_s <= end_s:
                    told.planned.append((at_s, event))
                case CopiesEnded():
                    told.copies.append((at_s, event))
                case PromotionEnded():
                    told.promotions.append((at_s, event))
                case GateDecided():
                    told.gate = event
        return told

    def _part_at(self, at_s: float, parts: Sequence[int]) -> int:
        """Return the part of a leg that contains a time."""
        return next((i for i in parts if at_s < self.spans[i].end_s), parts[-1])

    def _copies(self, told: _LegNotes, instance: str, parts: Sequence[int]) -> None:
        """Add the spans of promotions, and of fetches and saves, which run beside computing.

        Fetches start at the beginning of their step, and saves end at its end.
        """
        for at_s, waited in told.promotions:
            began_s = at_s - waited.wait_s
            parent = self._part_at(began_s, parts)
            known: dict[str, Any] = {"outcome": waited.outcome, "blocks": waited.arrived_blocks}
            self._add(SpanName.PROMOTE, began_s, at_s, instance, parent, **known)
        for at_s, copied in told.copies:
            longest_s = max(copied.fetch_s, copied.save_s, copied.compute_s or 0.0)
            planned_s = told.planned_s(copied.step)
            began_s = planned_s if planned_s is not None else at_s - longest_s
            parent = self._part_at(began_s, parts)
            if blocks := copied.fetched_blocks:
                until_s = min(at_s, began_s + copied.fetch_s)
                self._add(SpanName.FETCH, began_s, until_s, instance, parent, blocks=blocks)
            if blocks := copied.saved_blocks:
                from_s = max(began_s, at_s - copied.save_s)
                self._add(SpanName.SAVE, from_s, at_s, instance, parent, blocks=blocks)

    def _felt(self, instance: str, start_s: float, end_s: float, parts: Sequence[int]) -> None:
        """Add the standstills for moves of the instance's modules while a leg ran there."""
        for one in self._lines:
            move = one.event
            if not isinstance(move, MoveCommitted) or move.instance != instance:
                continue
            began_s = one.at_s - move.stall_s
            if start_s <= one.at_s and began_s <= end_s:
                self._add(
                    SpanName.MOVE,
                    began_s,
                    one.at_s,
                    instance,
                    self._part_at(began_s, parts),
                    move_id=move.move_id,
                    modules=move.modules,
                    to=move.to or "home",
                )
