"""Control loop: view, decide, begin steps, record outcomes. Serving never depends on the loop."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from banaserve.base.clock import Clock
from banaserve.base.errors import PolicyError, one_line
from banaserve.base.plugins.policy_options import option_names
from banaserve.base.types import Attempt, ClusterView, InstanceId, Step
from banaserve.contracts.control_api import (
    ControllerState,
    ControllerStatus,
    DecisionRecord,
    WantedStep,
)
from banaserve.contracts.instances import Ending, Executor, StepOutcome
from banaserve.orchestrator.control.move_policies import registry
from banaserve.orchestrator.control.move_policies.interface import MigrationPlan
from banaserve.orchestrator.control.turn import (
    ControlLimits,
    Held,
    Mode,
    Remembered,
    concluded,
    to_plan_for,
)
from banaserve.orchestrator.planner.loop import metrics
from banaserve.orchestrator.planner.loop.decision_format import (
    REBALANCER,
    changes,
    decision_of,
    result_of,
)
from banaserve.orchestrator.planner.loop.decision_log import DecisionLog
from banaserve.orchestrator.planner.policy import Elastic, plan_of
from banaserve.orchestrator.planner.process import DecisionProcess

logger = logging.getLogger(__name__)

_SETTLED_S = 5.0
"""Time from the end of a step until its effect is measured, in seconds."""
_PAUSES_S = (1.0, 2.0, 5.0, 15.0, 60.0)
"""Pauses before a restart of the loop, by the number of failures without a decision in between."""
_LEARNT = {"link_bytes_per_s": "bytes_per_s", "link_sync_s": "sync_s", "link_hop_s": "hop_s"}
"""Policies' options for properties of the link, with the names of the ``Link`` attributes."""


@dataclass(frozen=True, slots=True)
class ControllerOptions:
    """Options of the loop.

    Attributes:
        policy: Name of the migration policy.
        section: Options of that policy; missing link properties are those that the executor has
            learnt.
        interval_s: Time between two decisions, in seconds.
        time: Description of how time passes, for the log; empty in real time.
    """

    mode: Mode = Mode.DRY_RUN
    policy: str = "repaired"
    section: Mapping[str, Any] = field(default_factory=dict)
    interval_s: float = 2.0
    limits: ControlLimits = field(default_factory=ControlLimits)
    time: str = ""


@dataclass(slots=True)
class _Settling:
    """A step that has ended and whose effect is not measured yet."""

    decision: DecisionRecord
    wanted: WantedStep
    instances: tuple[InstanceId, ...]
    ended_s: float


class Controller:
    """Controller that decides every few seconds and lets the executor carry out permitted steps.

    A failure of the loop is logged in one line, and the loop starts again from the state that the
    instances report; steps under way belong to the executor and continue. Decisions and a pause
    outlive the failure.

    Args:
        wall: Clock that returns seconds since 1970, for log records.
    """

    def __init__(
        self,
        executor: Executor,
        options: ControllerOptions,
        log: DecisionLog,
        clock: Clock,
        wall: Callable[[], float],
    ) -> None:
        registry.make(options.policy, **options.section)  # a wrong option stops here
        self.log = log
        self._executor = executor
        self._options = options
        self._clock = clock
        self._wall = wall
        self._state = ControllerState.OFF
        self._is_paused = False
        self._remembered = Remembered()
        self._settling: list[_Settling] = []
        self._deciding = DecisionProcess()
        self._carrying: set[asyncio.Task[object]] = set()
        self._waiting: list[list[tuple[Step, WantedStep]]] = []
        self._loop: asyncio.Task[None] | None = None
        self._num_turns = 0
        self._num_restarts = 0
        self._error = ""
        self._counted: set[str] = set()

    # ---- life

    def start(self) -> None:
        """Start the loop; without effect if the mode is off."""
        if self._options.mode is not Mode.OFF:
            self._enter(ControllerState.STARTING)
            self._loop = asyncio.create_task(self._supervised())

    async def stop(self) -> None:
        """End the loop, and abort its steps under way."""
        tasks = [*self._carrying, *([self._loop] if self._loop is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._deciding.stop()
        self._enter(ControllerState.OFF)

    def set_paused(self, paused: bool) -> None:
        """Pause or resume: while paused, no step begins; decisions and steps under way continue."""
        self._is_paused = paused
        if self._state in (ControllerState.RUNNING, ControllerState.PAUSED):
            self._enter(self._running_state)

    def status(self) -> ControllerStatus:
        options, link = self._options, self._executor.link()
        last = [one for one in self.log.last() if one.policy != REBALANCER][-1:]
        return ControllerStatus(
            state=self._state,
            mode=options.mode.value,
            policy=options.policy,
            interval_s=options.interval_s,
            num_decisions=self.log.num_decisions,
            num_restarts=self._num_restarts,
            error=self._error,
            last_at_s=last[0].at_s if last else None,
            gap=last[0].gap if last else 0.0,
            reason=last[0].reason if last else "",
            left_out=last[0].left_out if last else {},
            **{option: getattr(link, name) for option, name in _LEARNT.items()},
        )

    async def _supervised(self) -> None:
        num_failures = 0
        while True:
            before = self._num_turns
            try:
                await self._run()
            except Exception as failure:
                num_failures = 0 if self._num_turns > before else num_failures
                pause_s = _PAUSES_S[min(num_failures, len(_PAUSES_S) - 1)]
                num_failures += 1
                self._failed(failure, pause_s)
                await self._clock.sleep(pause_s)

    def _failed(self, failure: Exception, pause_s: float) -> None:
        self._num_restarts += 1
        metrics.RESTARTS.inc()
        is_policys = isinstance(failure, PolicyError)
        place = (failure.__cause__ or failure) if is_policys else failure
        frame = traceback.extract_tb(place.__traceback__)[-1]
        self._error = str(failure) if is_policys else one_line(failure)
        logger.error(
            "the orchestrator failed (%s, %s:%s) and begins again in %g s; serving goes on",
            self._error,
            frame.filename.rpartition("/")[2],
            frame.lineno,
            pause_s,
        )
        self._enter(ControllerState.RESTARTING)

    @property
    def _running_state(self) -> ControllerState:
        return ControllerState.PAUSED if self._is_paused else ControllerState.RUNNING

    def _enter(self, state: ControllerState) -> None:
        self._state = state
        is_running = state is ControllerState.RUNNING
        metrics.RUNNING.labels(self._options.mode.value).set(is_running)

    # ---- deciding

    async def _run(self) -> None:
        # Times of begun and failed steps outlive a failure of the loop; smoothed reports do not.
        last = self._remembered
        self._remembered = Remembered(begun_s=last.begun_s, failed_s=last.failed_s)
        await self._executor.discover()
        self._enter(self._running_state)
        while True:
            await self._clock.sleep(self._options.interval_s)
            await self._turn()

    async def _turn(self) -> None:
        began_s = self._clock.now()
        policy = registry.make_named(self._options.policy, **self._section())
        options = self._options
        seen = self._executor.view()
        waiting = [step for left in self._waiting for step, _ in left]
        seen = replace(seen, under_way=(*seen.under_way, *waiting))
        view, _ = to_plan_for(seen, options.limits, self._remembered)
        plan = await self._plan(policy, view)
        # Steps that have failed or begun while the policy planned count, too.
        _, before = to_plan_for(seen, options.limits, self._remembered)
        found = concluded(view, plan, options.mode, self._is_paused, options.limits, before)
        self._remembered = found.after
        mode = "paused" if self._is_paused else options.mode.value
        decision = decision_of(found, mode, options.policy, self._wall(), options.time)
        decision.took_s = self._clock.now() - began_s
        decision = self.log.add(decision)
        self._num_turns += 1
        _count(decision)
        self._count_left_out(decision)
        self._settle(found.view)
        pairs = list(zip(found.begin, decision.steps, strict=False))
        if plan.is_ordered and pairs:
            self._carry(self._carry_out_in_order(pairs, decision))
        else:
            for step, wanted in pairs:
                self._carry(self._carry_out(step, wanted, decision))
        metrics.UNDER_WAY.set(len(found.view.under_way) + len(found.begin))

    async def _plan(
        self, policy: registry.NamedMigrationPolicy, view: ClusterView
    ) -> MigrationPlan:
        """Return the policy's plan; a plan that takes seconds is made in a separate process."""
        if isinstance(elastic := policy.policy, Elastic):
            decision = await self._deciding.decide(elastic.situation(view), elastic.options)
            return plan_of(decision, view, elastic.options)
        return policy.plan(view)

    def _section(self) -> dict[str, Any]:
        section, link = dict(self._options.section), self._executor.link()
        known = option_names(registry.POLICIES.get(self._options.policy).Options)
        for option in _LEARNT.keys() & set(known):
            section.setdefault(option, getattr(link, _LEARNT[option]))
        return section

    def _count_left_out(self, decision: DecisionRecord) -> None:
        names = {*decision.instances, *decision.left_out}
        for name in self._counted - names:
            metrics.LEFT_OUT.remove(name)
        for name in names:
            metrics.LEFT_OUT.labels(name).set(name in decision.left_out)
        self._counted = names

    # ---- outcomes

    def _carry(self, work: Coroutine[Any, Any, object]) -> None:
        task = asyncio.create_task(work)
        self._carrying.add(task)
        task.add_done_callback(self._carrying.discard)

    async def _carry_out_in_order(
        self, pairs: Sequence[tuple[Step, WantedStep]], decision: DecisionRecord
    ) -> None:
        """Carry out each step after the previous one is done; stop at the first that is not.

        A pause stops them too: none begins while paused.
        """
        left = list(pairs)
        self._waiting.append(left)
        try:
            held = Held.EARLIER
            while left and await self._carry_out(*left.pop(0), decision):
                if self._is_paused:
                    held = Held.PAUSED
                    break
            for _, wanted in left:
                wanted.held = str(held)
            if left:
                self.log.write(decision)
        finally:
            self._waiting.remove(left)

    async def _carry_out(self, step: Step, wanted: WantedStep, decision: DecisionRecord) -> bool:
        """Carry out ``step`` and record its outcome; return whether it is done."""
        logger.info("orchestrator: %s", wanted.what)
        try:
            outcome = await self._executor.carry_out(step)
        except Exception as broken:
            logger.exception("orchestrator: %s", wanted.what)
            outcome = StepOutcome(Ending.FAILED, f"{type(broken).__name__}: {broken}")
        wanted.result = result_of(outcome, self._wall())
        metrics.STEPS.labels(wanted.kind, outcome.ending).inc()
        now_s = self._clock.now()
        if outcome.ending is not Ending.DONE:
            logger.warning("orchestrator: %s: %s %s", wanted.what, outcome.ending, outcome.reason)
            self._remembered = self._remembered.with_failed(step.action, now_s)
            self.log.write(decision)
            return False
        error = abs(step.cost_s - outcome.seconds) / max(outcome.seconds, 1e-9)
        metrics.COST_ERROR.labels(Attempt.of(step.action).kind).set(error)
        self._settling.append(_Settling(decision, wanted, step.instances, now_s))
        return True

    def _settle(self, view: ClusterView) -> None:
        """Measure and record the effects of ended steps, once the smoothed reports show them."""
        due = [one for one in self._settling if view.now_s - one.ended_s >= _SETTLED_S]
        for one in due:
            assert one.wanted.result is not None
            one.wanted.result.changed = changes(one.decision.instances, view, one.instances)
            self.log.write(one.decision)
            self._settling.remove(one)


def _count(decision: DecisionRecord) -> None:
    begun = sum(not step.held for step in decision.steps)
    outcome = "steps" if begun else "held" if decision.steps else "none"
    metrics.DECISIONS.labels(outcome).inc()
    metrics.DECISION_S.observe(decision.took_s)
    metrics.GAP.set(decision.gap)
    for rejected in decision.rejected:
        metrics.REJECTED.labels(rejected.reason).inc()
    for step in decision.steps:
        if step.held:
            metrics.HELD.labels(step.held).inc()
