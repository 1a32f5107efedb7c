"""Parts of a request's time, made from the events of all processes. Pure.

Parts without a parent follow one another without gaps, from the time at which the request's head
was received to the last byte of the answer; each sequence of a request (``n`` > 1) has a row of its
own. Parts that run in parallel, or that only an engine knows of, are children of these.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

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

Event = TypeVar("Event")


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


@dataclass(slots=True)
class _Leg:
    """A leg that has begun.

    Attributes:
        follows_prefill: True if a prefill leg left the prompt of this leg in the store.
        output_s: Time at which the leg's first own output arrived; None before that.
        notes: Events that the leg's engine reported, in the order of time; set at the leg's end.
    """

    began_s: float
    event: LegBegan
    follows_prefill: bool
    output_s: float | None = None
    notes: Sequence[TraceLine] = ()

    def all(self, kind: type[Event]) -> list[tuple[float, Event]]:
        """Return the engine's events of one kind, each with its time."""
        return [(one.at_s, one.event) for one in self.notes if isinstance(one.event, kind)]

    def steps(self, phase: str) -> list[StepsPlanned]:
        return [steps for _, steps in self.all(StepsPlanned) if steps.phase == phase]

    @property
    def first_s(self) -> float | None:
        """Time at which the engine began to compute the leg; None before that."""
        return next((at_s for at_s, _ in self.all(StepsPlanned)), None)

    @property
    def decodes_s(self) -> float | None:
        """Time at which the leg began to decode; None before that, and for a prefill leg."""
        if self.event.leg == "prefill":
            return None
        planned = self.all(StepsPlanned)
        first = next((at_s for at_s, steps in planned if steps.phase == "decode"), None)
        if first is None and (not planned or self.event.leg == "decode"):
            return self.output_s
        return first


class _Timeline:
    """Spans of one request, built from its events in order."""

    def __init__(self, summary: RequestSummary, lines: Sequence[TraceLine]) -> None:
        self.spans: list[TraceSpan] = []
        self._lines = lines
        self._until_s = summary.took_s
        if summary.received_s > 0:
            self._add(SpanName.RECEIVE, -summary.received_s, 0.0)
        prepared_s = next((one.at_s for one in lines if isinstance(one.event, Prepared)), 0.0)
        if prepared_s > 0:
            self._add(SpanName.PREPARE, 0.0, prepared_s)
        ended_s = prepared_s
        for number, sequence in enumerate(self._sequences()):
            starts_s = prepared_s if number == 0 else sequence[0].at_s
            ended_s = max(ended_s, self._sequence(sequence, starts_s, with_lookup=number == 0))
        if summary.answered_s is not None and summary.answered_s > ended_s:
            self._add(SpanName.RESPOND, ended_s, summary.answered_s)
        elif summary.end and self._until_s > ended_s:
            self._add(SpanName.RESPOND, ended_s, self._until_s)

    def _add(
        self,
        name: str,
        start_s: float,
        end_s: float,
        process: str = FRONT_DOOR,
        parent: int = -1,
        **attributes: str | int | float | None,
    ) -> int:
        """Add a span and return its index; an attribute that is None is left out."""
        known = {key: value for key, value in attributes.items() if value is not None}
        made = TraceSpan(name, start_s, max(start_s, end_s), process, parent, known)
        self.spans.append(made)
        return len(self.spans) - 1

    # ---- one sequence

    def _sequences(self) -> list[list[TraceLine]]:
        """Return the front door's events of each sequence; its legs share a part of their ids."""
        found: dict[str, list[TraceLine]] = {}
        for one in self._lines:
            if one.process == FRONT_DOOR and one.leg_id:
                found.setdefault(_LEG_SUFFIX.sub("", one.leg_id), []).append(one)
        return list(found.values())

    def _sequence(self, lines: Sequence[TraceLine], starts_s: float, *, with_lookup: bool) -> float:
        """Add the spans of a sequence; return the time at which the last of them ends."""
        cursor_s = starts_s
        leg: _Leg | None = None
        waits_s: float | None = None
        follows_prefill, retries = False, 0
        for one in lines:
            event = one.event
            match event:
                case NoInstance():
                    waits_s = one.at_s
                case Routed():
                    self._route(cursor_s, one.at_s, event, waits_s, retries, with_lookup)
                    cursor_s, waits_s, with_lookup = one.at_s, None, False
                case LegBegan():
                    leg = _Leg(one.at_s, event, follows_prefill)
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
            self._add(SpanName.WAIT, cursor_s, self._until_s)
        elif leg is not None:  # under way, or its client has left
            self._leg(leg, cursor_s, self._until_s, "")
        else:
            return cursor_s
        return self._until_s

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

    def _leg(self, leg: _Leg, start_s: float, end_s: float, error: str) -> None:
        """Add the spans of a leg from ``start_s``, the end of the preceding part."""
        leg.notes = self._notes_of(leg, end_s)
        decodes_s = leg.decodes_s
        until_s = decodes_s if decodes_s is not None else end_s
        if leg.event.leg == "decode" and (leg.follows_prefill or not leg.event.resumed_tokens):
            parts = self._hand_over(leg, start_s, until_s)
        else:
            parts = self._prompt(leg, start_s, until_s)
        if decodes_s is not None and end_s > decodes_s:
            parts.append(self._decode(leg, decodes_s, end_s))
        if error:
            self.spans[parts[-1]].error = error
        self._copies(leg, parts)
        self._felt(leg.event.instance, start_s, end_s, parts)

    def _notes_of(self, leg: _Leg, end_s: float) -> list[TraceLine]:
        """Return what the leg's engine reported of it; a step must be planned before the end."""
        own = (leg.event.engine_request_id, leg.event.instance)
        return [
            one
            for one in self._lines
            if (one.leg_id, one.process) == own
            and leg.began_s <= one.at_s <= end_s + _LATE_S
            and (one.at_s <= end_s or not isinstance(one.event, StepsPlanned))
        ]

    def _hand_over(self, leg: _Leg, start_s: float, until_s: float) -> list[int]:
        """Add the span of a hand-over, until the decode leg computes its own output.

        It consists of the leg's wait and of the step that fetches the blocks.
        """
        instance, first_s = leg.event.instance, leg.first_s
        whole = self._add(SpanName.HAND_OVER, start_s, until_s, instance)
        if first_s is not None:
            self._add(SpanName.QUEUE, leg.began_s, first_s, instance, parent=whole)
        return [whole]

    def _prompt(self, leg: _Leg, start_s: float, until_s: float) -> list[int]:
        """Add the spans until the prompt, and any output that came with it, has been computed."""
        parts, instance, first_s = [], leg.event.instance, leg.first_s
        is_known = bool(leg.all(EngineReceived))  # the engine's scheduler has looked at the leg
        if first_s is not None or is_known:
            queued_s = first_s if first_s is not None else until_s
            parts.append(self._add(SpanName.QUEUE, start_s, queued_s, instance))
        if first_s is not None or not is_known:
            begins_s = first_s if first_s is not None else start_s
            tokens, num_steps = _work(leg.steps("prompt"))
            gates = [gate.decision for _, gate in leg.all(GateDecided)]
            prefill = self._add(
                SpanName.PREFILL,
                begins_s,
                until_s,
                instance,
                tokens=tokens,
                steps=num_steps,
                resumed_tokens=leg.event.resumed_tokens or None,
                fetch_decision=gates[-1] if gates else None,
            )
            parts.append(prefill)
        return parts

    def _decode(self, leg: _Leg, start_s: float, end_s: float) -> int:
        steps = leg.steps("decode")
        tokens, num_steps = _work(steps)
        return self._add(
            SpanName.DECODE,
            start_s,
            end_s,
            leg.event.instance,
            tokens=tokens,
            steps=num_steps,
            longest_gap_ms=max((1e3 * one.longest_gap_s for one in steps), default=None),
            saved_blocks=sum(one.saved_blocks for one in steps) or None,
        )

    def _part_at(self, at_s: float, parts: Sequence[int]) -> int:
        """Return the part of a leg that contains a time."""
        return next((i for i in parts if at_s < self.spans[i].end_s), parts[-1])

    def _copies(self, leg: _Leg, parts: Sequence[int]) -> None:
        """Add the spans of promotions, and of fetches and saves, which run beside computing.

        Fetches start at the beginning of their step, and saves end at its end.
        """
        instance = leg.event.instance
        for at_s, waited in leg.all(PromotionEnded):
            began_s = at_s - waited.wait_s
            parent = self._part_at(began_s, parts)
            self._add(
                SpanName.PROMOTE,
                began_s,
                at_s,
                instance,
                parent,
                outcome=waited.outcome,
                blocks=waited.arrived_blocks,
            )
        planned_s = {steps.first_step: at_s for at_s, steps in reversed(leg.all(StepsPlanned))}
        for at_s, copied in leg.all(CopiesEnded):
            longest_s = max(copied.fetch_s, copied.save_s, copied.compute_s or 0.0)
            began_s = planned_s.get(copied.step, at_s - longest_s)
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


def _work(steps: Sequence[StepsPlanned]) -> tuple[int | None, int | None]:
    """Return the number of tokens and the number of steps; None for none."""
    tokens, num_steps = sum(one.num_tokens for one in steps), sum(one.num_steps for one in steps)
    return tokens or None, num_steps or None
