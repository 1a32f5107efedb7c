"""One turn of the control loop without its effects: the decision, and the steps that may begin.

A policy proposes steps. This module decides which of them may begin now: none while paused or in a
dry run, no more than the limits allow, and none that failed recently.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from banaserve.base.errors import UserError
from banaserve.base.types import (
    Action,
    Attempt,
    ClusterView,
    MoveModule,
    SetStepTokens,
    Step,
    SwitchRole,
)
from banaserve.orchestrator.control.measure import Reports, smoothed
from banaserve.orchestrator.control.move_policies.interface import MigrationPlan, MigrationPolicy
from banaserve.orchestrator.control.move_policies.scoring import words_of


class Mode(StrEnum):
    """Mode of the controller: whether the steps of a plan are carried out."""

    OFF = "off"
    DRY_RUN = "dry-run"
    ON = "on"


class Held(StrEnum):
    """Reason that a step of a plan does not begin: shown to users, and a metric's label."""

    DRY_RUN = "dry run: nothing is moved"
    PAUSED = "the orchestrator is paused"
    CONCURRENT = "as many steps as may be are under way"
    RATE = "as many steps as may be have begun within a minute"
    FAILED = "it failed a moment ago"
    EARLIER = "a step before it has not come about"


@dataclass(frozen=True, slots=True)
class ControlLimits:
    """Limits of the steps that begin and that are under way.

    Attributes:
        concurrent: Maximum number of steps under way in the whole cluster.
        per_minute: Maximum number of steps that begin within a minute.
        retry_after_s: Time after a failure before the same attempt may be repeated, in seconds;
            until then, policies skip the attempt.
        smoothing_s: Time constant of the smoothing of the reports that a policy sees, in seconds.
        minute_s: Duration of the cluster's minute, on the clock of its views.
    """

    concurrent: int = 2
    per_minute: int = 6
    retry_after_s: float = 60.0
    smoothing_s: float = 5.0
    minute_s: float = 60.0

    def __post_init__(self) -> None:
        for name in ("concurrent", "per_minute"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}: give 1 or more")
        if self.retry_after_s < 0 or min(self.smoothing_s, self.minute_s) <= 0:
            raise UserError("retry_after_s is 0 or more, smoothing_s and minute_s above 0")


@dataclass(frozen=True, slots=True)
class Remembered:
    """State that one turn hands to the next; empty when the loop begins.

    Attributes:
        reports: Smoothed reports, by instance.
        is_balancing, memory: Values of these fields in the last plan.
        begun_s: Times at which steps began, within the last minute.
        failed_s: Times of recent failures, by attempt.
    """

    reports: Reports = field(default_factory=dict)
    is_balancing: bool = False
    memory: object = None
    begun_s: tuple[float, ...] = ()
    failed_s: Mapping[Attempt, float] = field(default_factory=dict)

    def with_failed(self, action: Action, now_s: float) -> Remembered:
        """Return a copy with ``action`` among the failed attempts."""
        return replace(self, failed_s={**self.failed_s, Attempt.of(action): now_s})


@dataclass(frozen=True, slots=True)
class Turn:
    """Result of one turn.

    Attributes:
        view: View that the policy saw.
        begin: Steps to carry out, in this order.
        held: Steps that the policy wants and that do not begin, each with the reason.
        after: State for the next turn.
    """

    view: ClusterView
    plan: MigrationPlan
    begin: tuple[Step, ...]
    held: tuple[tuple[Step, Held], ...]
    after: Remembered


def turn(
    seen: ClusterView,
    policy: MigrationPolicy,
    mode: Mode,
    is_paused: bool,
    limits: ControlLimits,
    before: Remembered,
) -> Turn:
    """Return the turn for the cluster as ``seen``. Pure: equal arguments give equal results."""
    view, before = to_plan_for(seen, limits, before)
    return concluded(view, policy.plan(view), mode, is_paused, limits, before)


def to_plan_for(
    seen: ClusterView, limits: ControlLimits, before: Remembered
) -> tuple[ClusterView, Remembered]:
    """Return the cluster as a policy sees it, and the state for ``concluded``."""
    now_s, failed_s = seen.now_s, before.failed_s.items()
    before = replace(
        before,
        begun_s=tuple(at for at in before.begun_s if now_s - at < limits.minute_s),
        failed_s={attempt: at for attempt, at in failed_s if now_s - at < limits.retry_after_s},
    )
    known = replace(
        seen,
        is_balancing=before.is_balancing,
        memory=before.memory,
        failed=frozenset(before.failed_s),
    )
    view, reports = smoothed(known, before.reports, limits.smoothing_s)
    return view, replace(before, reports=reports)


def concluded(
    view: ClusterView,
    plan: MigrationPlan,
    mode: Mode,
    is_paused: bool,
    limits: ControlLimits,
    before: Remembered,
) -> Turn:
    """Return the turn that results from ``plan``, made for ``view``."""
    begin: list[Step] = []
    held: list[tuple[Step, Held]] = []

    def reason_against(step: Step) -> Held | None:
        if held:
            return held[0][1]  # later steps of a plan rely on the earlier ones
        if mode is not Mode.ON:
            return Held.DRY_RUN
        if is_paused:
            return Held.PAUSED
        if Attempt.of(step.action) in before.failed_s:
            return Held.FAILED
        if _is_free(step):
            return None
        num_begun = sum(not _is_free(other) for other in begin)
        num_at_once = 0 if plan.is_ordered else num_begun
        if len(view.under_way) + num_at_once >= limits.concurrent:
            return Held.CONCURRENT
        if len(before.begun_s) + num_begun >= limits.per_minute:
            return Held.RATE
        return None

    for step in plan.steps:
        reason = reason_against(step)
        if reason is None:
            begin.append(step)
        else:
            held.append((step, reason))
    after = replace(
        before,
        is_balancing=plan.is_balancing,
        memory=plan.memory,
        begun_s=(*before.begun_s, *(view.now_s for step in begin if not _is_free(step))),
    )
    return Turn(view, plan, tuple(begin), tuple(held), after)


def _is_free(step: Step) -> bool:
    """Return whether ``step`` copies and drains nothing, so that the limits do not apply to it."""
    return isinstance(step.action, SetStepTokens)


def words(action: Action) -> str:
    """Return a description of ``action``, worded as policies word their candidates."""
    if isinstance(action, SwitchRole):
        size = f" with steps of {action.step_tokens} tokens" if action.step_tokens else ""
        return f"switch {action.instance} from {action.old.value} to {action.role.value}{size}"
    if isinstance(action, SetStepTokens):
        return f"steps of {action.tokens} tokens on {action.instance} instead of {action.old}"
    if isinstance(action, MoveModule):
        return words_of("move", action.module, action.host, action.guest)
    return words_of("return", action.module, action.guest, action.host)
