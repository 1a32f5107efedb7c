"""Decision logs of made-up clusters, for the page: any number of instances, moves in both ways."""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec

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

BEGAN_S = 1.7e9
LAYERS, HEADS = 30, 3


def names(num_instances: int) -> list[str]:
    """Half for prefill, half for decode; one alone does both."""
    if num_instances == 1:
        return ["c0"]
    half = num_instances // 2
    return [f"p{i}" for i in range(half)] + [f"d{i}" for i in range(num_instances - half)]


def decisions(num_instances: int, count: int = 12, seed: int = 1) -> list[DecisionRecord]:
    """Decisions two seconds apart; every third begins a move of layers of the last instance."""
    draw = random.Random(seed)
    ids = names(num_instances)
    host, guest = ids[-1], ids[0]
    away: list[PlacedModule] = []
    made = []
    for number in range(1, count + 1):
        at_s = BEGAN_S + 2.0 * number
        seen = {one: _numbers(one, away if one == host else [], draw) for one in ids}
        steps = []
        if number % 3 == 1 and num_instances > 1:
            placed = PlacedModule(4 * len(away), 4 * len(away) + 4, [], guest)
            steps.append(_moved(placed, host, at_s))
            away = [*away, placed]
        made.append(
            DecisionRecord(
                number=number,
                at_s=at_s,
                mode="on",
                policy="repaired",
                gap=draw.random(),
                is_balancing=bool(steps),
                reason="no candidate is worth it",
                instances=seen,
                left_out={ids[0]: "its report is stale"} if number == 2 else {},
                steps=steps,
                rejected=[
                    Rejection(f"move layers {i}:{i + 4} from {host} to {one}", "no room", 0.25)
                    for i, one in enumerate(ids[:5])
                ],
                num_layers=LAYERS,
                num_kv_heads=HEADS,
            )
        )
    return made


def _numbers(name: str, away: list[PlacedModule], draw: random.Random) -> Numbers:
    role = {"p": "prefill", "d": "decode", "c": "colocated"}[name[0]]
    return Numbers(
        role=role,
        compute=draw.random(),
        memory=draw.random(),
        busy_fraction=draw.random(),
        step_fill_fraction=draw.random(),
        step_s=0.02 + 0.02 * draw.random(),
        step_tokens=64.0,
        num_running=draw.randrange(20),
        num_waiting=draw.randrange(5),
        inflight_prefill_tokens=0,
        num_kv_blocks=600,
        guest_bytes=0,
        age_s=0.2,
        away=[f"layers {one.first_layer}:{one.end_layer} at {one.at}" for one in away],
        placements=away,
    )


def _moved(placed: PlacedModule, host: str, at_s: float) -> WantedStep:
    first, end = placed.first_layer, placed.end_layer
    return WantedStep(
        what=f"move layers {first}:{end} from {host} to {placed.at}",
        kind="layers",
        cost_s=1.1,
        benefit_s=6.5,
        timeout_s=60.0,
        predicted={host: Felt(-0.1, -0.3, 120, -0.002), placed.at: Felt(0.1, 0.0, -20, 0.001)},
        result=StepRecord(
            ending="done",
            reason="",
            seconds=1.3,
            num_bytes=31 << 20,
            stall_s=0.004,
            blocks_gained=118,
            reverted=False,
            changed={host: Felt(-0.08, -0.28, 118, -0.0018)},
            ended_at_s=at_s + 1.3,
        ),
        move=WantedMove(host, placed.at, first, end, []),
    )


def lines(made: list[DecisionRecord]) -> Iterator[bytes]:
    """The log as the control loop writes it: a decision as it is made, again with its results."""
    for one in made:
        open_steps = [msgspec.structs.replace(step, result=None) for step in one.steps]
        yield msgspec.json.encode(msgspec.structs.replace(one, steps=open_steps))
        if one.steps:
            yield msgspec.json.encode(one)


def text(made: list[DecisionRecord]) -> bytes:
    """A whole file."""
    return b"".join(line + b"\n" for line in lines(made))
