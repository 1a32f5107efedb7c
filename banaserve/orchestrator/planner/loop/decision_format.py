"""Conversion of turns of the control loop to records of the decision log. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from banaserve.base.types import (
    Attempt,
    BackPressure,
    ClusterView,
    InstanceId,
    InstanceView,
    MoveModule,
    ReturnModule,
    Step,
)
from banaserve.contracts.control_api import (
    DecisionRecord,
    Felt,
    Numbers,
    PlacedModule,
    Rejection,
    StepRecord,
    WantedMove,
    WantedStep,
)
from banaserve.contracts.instances import Ending, StepOutcome
from banaserve.kvstore.sizes import format_size
from banaserve.orchestrator.control.measure import load_of
from banaserve.orchestrator.control.move_policies.scoring import module_words
from banaserve.orchestrator.control.rebalancing import Stream
from banaserve.orchestrator.control.turn import Held, Mode, Turn, words

REBALANCER = "rebalancer"
"""Policy name in decisions of the rebalancer."""


def decision_of(turn: Turn, mode: str, policy: str, at_s: float, time: str = "") -> DecisionRecord:
    """Return the record of ``turn``; the log assigns its number.

    Args:
        at_s: Time of the decision, in seconds since 1970, or in virtual time.
        time: Description of how time passes; empty in real time.
    """
    plan = turn.plan
    known = [one.facts for one in turn.view.instances.values() if one.facts is not None]
    steps = [wanted(step, None) for step in turn.begin]
    steps += [wanted(step, held) for step, held in turn.held]
    return DecisionRecord(
        number=0,
        at_s=at_s,
        mode=mode,
        policy=policy,
        gap=plan.gap,
        is_balancing=plan.is_balancing,
        reason=plan.reason,
        instances=numbers_of(turn.view),
        left_out={name: str(reason) for name, reason in plan.left_out.items()},
        steps=steps,
        rejected=[Rejection(r.candidate, str(r.reason), r.value) for r in plan.rejected],
        num_layers=max((one.num_layers for one in known), default=0),
        num_kv_heads=max((one.num_kv_heads for one in known), default=0),
        time=time,
        back_pressure=pressure_words(turn.view.back_pressure),
    )


def pressure_words(pressure: BackPressure | None) -> str:
    """Return the reason why prefill waits, in words; empty if it does not wait."""
    if pressure is None:
        return ""
    num = pressure.num_prompts
    waiting = "1 prompt waits" if num == 1 else f"{num} prompts wait"
    return (
        f"prefill waits: the store holds {pressure.held_blocks} of {pressure.num_blocks} blocks "
        f"({format_size(pressure.held_bytes)}) for hand-overs; {waiting}, "
        f"the longest for {pressure.longest_s:.1f} s"
    )


def rebalancing_of(
    view: ClusterView, moves: Mapping[InstanceId, Sequence[Stream]], at_s: float, time: str = ""
) -> DecisionRecord:
    """Return the record of streams that leave overloaded instances.

    Args:
        moves: Streams that leave each instance.
        at_s: Time of the decision, in seconds since 1970.
        time: Description of how time passes; empty in real time.
    """
    counts = [one.inflight_requests for one in view.instances.values() if one.ready]
    return DecisionRecord(
        number=0,
        at_s=at_s,
        mode=Mode.ON.value,
        policy=REBALANCER,
        gap=max(counts) / (sum(counts) / len(counts)) - 1.0 if any(counts) else 0.0,
        is_balancing=True,
        reason="other streams have moved lately, would cost more than they save, or are not many",
        instances=numbers_of(view),
        left_out={},
        steps=[_rebalanced(source, streams, at_s) for source, streams in moves.items()],
        rejected=[],
        time=time,
    )


def _rebalanced(source: InstanceId, streams: Sequence[Stream], at_s: float) -> WantedStep:
    num_waiting = sum(stream.is_waiting for stream in streams)
    unit = "stream leaves" if len(streams) == 1 else "streams leave"
    return WantedStep(
        what=f"{len(streams)} {unit} {source}, {num_waiting} of which had not begun there",
        kind="streams",
        cost_s=0.0,
        benefit_s=0.0,
        timeout_s=0.0,
        predicted={},
        result=StepRecord(str(Ending.DONE), "", 0.0, 0, 0.0, 0, False, ended_at_s=at_s),
    )


def wanted(step: Step, held: Held | None) -> WantedStep:
    """Return the record of a step of a plan, with its predictions.

    Args:
        held: Reason why the step does not begin; None if it begins.
    """
    predicted: dict[str, Felt] = {
        name: Felt(felt.compute, felt.memory, felt.kv_blocks, felt.step_s)
        for name, felt in step.influence
    }
    return WantedStep(
        what=words(step.action),
        kind=Attempt.of(step.action).kind,
        cost_s=step.cost_s,
        benefit_s=step.benefit_s,
        timeout_s=step.timeout_s,
        predicted=predicted,
        held="" if held is None else str(held),
        move=_planned(step),
    )


def _planned(step: Step) -> WantedMove | None:
    action = step.action
    if not isinstance(action, MoveModule | ReturnModule):
        return None
    target = action.guest if isinstance(action, MoveModule) else action.host
    module = action.module
    return WantedMove(action.host, target, module.first_layer, module.end_layer, list(module.heads))


def result_of(outcome: StepOutcome, ended_at_s: float = 0.0) -> StepRecord:
    """Return the record of how a step has ended; its effect is added later.

    Args:
        ended_at_s: Time of the end, in seconds since 1970.
    """
    return StepRecord(
        ending=str(outcome.ending),
        reason=outcome.reason,
        seconds=outcome.seconds,
        num_bytes=outcome.num_bytes,
        stall_s=outcome.stall_s,
        blocks_gained=outcome.blocks_gained,
        reverted=outcome.reverted,
        ended_at_s=ended_at_s,
    )


def changes(
    before: dict[str, Numbers], now: ClusterView, names: tuple[InstanceId, ...]
) -> dict[str, Felt]:
    """Return the changes of the instances ``names`` since a decision.

    Args:
        before: Loads of the instances at the decision.
        now: Present view of the cluster.
    """
    seen = numbers_of(now)
    return {
        name: Felt(
            seen[name].compute - before[name].compute,
            seen[name].memory - before[name].memory,
            seen[name].num_kv_blocks - before[name].num_kv_blocks,
            seen[name].step_s - before[name].step_s,
        )
        for name in names
        if name in seen and name in before
    }


def numbers_of(view: ClusterView) -> dict[str, Numbers]:
    """Return the load of every instance that has reported."""
    return {
        name: _numbers(one, view.now_s)
        for name, one in view.instances.items()
        if one.report is not None
    }


def _numbers(view: InstanceView, now_s: float) -> Numbers:
    report = view.report
    assert report is not None
    load = load_of(report)
    return Numbers(
        role=view.role.value,
        compute=load.compute,
        memory=load.memory,
        busy_fraction=report.busy_fraction,
        step_fill_fraction=report.step_fill_fraction,
        step_s=report.step_s,
        step_tokens=report.step_tokens,
        num_running=report.num_running,
        num_waiting=report.num_waiting,
        inflight_prefill_tokens=view.inflight_prefill_tokens,
        num_kv_blocks=report.num_kv_blocks,
        guest_bytes=report.guest_bytes,
        age_s=now_s - report.at_s,
        away=[f"{module_words(p.module)} at {p.guest}" for p in view.placements],
        placements=[
            PlacedModule(p.module.first_layer, p.module.end_layer, list(p.module.heads), p.guest)
            for p in view.placements
        ],
        gpu_busy_fraction=report.gpu_busy_fraction,
    )
