"""``banaserve decisions``: decisions of the orchestrator, their numbers and their outcome."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

from banaserve.base.arguments import AT_LEAST_1, option
from banaserve.cli.admin.options import JsonOptions
from banaserve.cli.app import App
from banaserve.cli.terminal.console import print_json
from banaserve.contracts.control_api import DecisionRecord, Felt, StepRecord, WantedStep
from banaserve.kvstore.sizes import format_size


def decisions(
    asked: JsonOptions,
    last: int = option("number of the last decisions to show", 10, rule=AT_LEAST_1),
    candidates: bool = option("name every candidate that was not taken", False),
) -> None:
    """Say what the orchestrator of a running server decided, and why."""
    found = asked.client().decisions(last)
    if asked.as_json:
        print_json(found)
        return
    for decision in found:
        for line in lines_of(decision, candidates):
            print(line)
    if not found:
        print("the orchestrator has decided nothing so far")


app = App(decisions)


def lines_of(decision: DecisionRecord, candidates: bool) -> Iterator[str]:
    """Yield the lines that show one decision."""
    at = time.strftime("%H:%M:%S", time.localtime(decision.at_s))
    turns = f", {decision.turns} times" if decision.turns > 1 else ""
    balancing = ", balancing" if decision.is_balancing else ""
    yield (
        f"#{decision.number} {at}{turns} ({decision.mode}, {decision.policy}): "
        f"gap {decision.gap:.2f}{balancing}; no {'further ' if decision.steps else ''}step: "
        f"{decision.reason}"
    )
    for name, seen in decision.instances.items():
        yield (
            f"    saw {name} ({seen.role}): compute {seen.compute:.0%}, memory {seen.memory:.0%}, "
            f"{seen.num_running} running, {seen.num_waiting} waiting, "
            f"step {1e3 * seen.step_s:.0f} ms, {seen.num_kv_blocks} blocks"
        )
    if decision.back_pressure:
        yield f"    {decision.back_pressure}"
    for name, reason in decision.left_out.items():
        yield f"    left out {name}: {reason}"
    for step in decision.steps:
        yield from _step_lines(step)
    yield from _rejected_lines(decision, candidates)


def _step_lines(step: WantedStep) -> Iterator[str]:
    yield (
        f"    {'wants' if step.held else 'begins'}: {step.what} "
        f"(predicted: {step.cost_s:.2f} s for {step.benefit_s:.2f} s)"
    )
    for name, felt in step.predicted.items():
        yield f"        predicted {name}: {_felt(felt)}"
    if step.held:
        yield f"        not begun: {step.held}"
    if step.result is not None:
        yield f"        {_result(step.result)}"
        for name, felt in step.result.changed.items():
            yield f"        seen {name}: {_felt(felt)}"


def _result(result: StepRecord) -> str:
    line = f"{result.ending} after {result.seconds:.2f} s"
    if result.reason:
        line += f": {result.reason}"
    if result.num_bytes:
        line += f", {format_size(result.num_bytes)}, stall {1e3 * result.stall_s:.1f} ms"
    if result.blocks_gained:
        line += f", {result.blocks_gained:+d} blocks"
    return line + (", taken back" if result.reverted else "")


def _felt(felt: Felt) -> str:
    parts = [f"compute {felt.compute:+.1%}"]
    if felt.memory:
        parts.append(f"memory {felt.memory:+.1%}")
    if felt.kv_blocks:
        parts.append(f"{felt.kv_blocks:+d} blocks")
    parts.append(f"step {1e3 * felt.step_s:+.1f} ms")
    return ", ".join(parts)


def _rejected_lines(decision: DecisionRecord, candidates: bool) -> Iterator[str]:
    if candidates:
        for one in decision.rejected:
            value = "" if one.value is None else f" ({one.value:.3g})"
            yield f"    not taken: {one.candidate}: {one.reason}{value}"
        return
    for reason, count in Counter(one.reason for one in decision.rejected).most_common():
        yield f"    not taken: {count} because {reason}"
