"""What a modelled step takes whose host and guests compute at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from banaserve.costs.steps import StepCosts
from banaserve.orchestrator.model.calibration import StepWork
from banaserve.orchestrator.model.overlapping import LEAST_PART_TOKENS, WORTH, makespan_s


class InParts(NamedTuple):
    """How a step runs fastest.

    Attributes:
        relief: Share of its own time, without messages, that is saved.
        busy_s: What all its parts take of all devices together, without messages.
    """

    relief: float
    busy_s: float


def in_parts(
    costs: StepCosts, work: StepWork, elsewhere: Sequence[float], most_parts: int
) -> InParts:
    """The best of all numbers of parts, of which each has a step's fixed part once more.

    Messages are taken to hide behind nothing.

    Args:
        costs: Of the host, relieved of nothing.
        elsewhere: Of its time, on the device of each guest that may compute at the same time.
        most_parts: That a step is cut into; 1: the host waits.
    """
    tokens = int(work.prefill_tokens + work.decode_requests)
    at_most = max(1, min(most_parts, tokens // LEAST_PART_TOKENS)) if elsewhere else 1
    here = 1.0 - sum(elsewhere)
    whole_s = best_s = busy_s = _part_s(costs, work, 1)
    for num_parts in range(2, at_most + 1):
        part_s = _part_s(costs, work, num_parts)
        took_s = makespan_s([share * part_s for share in (here, *elsewhere)], num_parts)
        if took_s < min(best_s, WORTH * whole_s):
            best_s, busy_s = took_s, num_parts * part_s
    return InParts(1.0 - best_s / whole_s if whole_s > 0 else 0.0, busy_s)


def _part_s(costs: StepCosts, work: StepWork, num_parts: int) -> float:
    step_s, _ = costs.mixed_s(
        -(-int(work.prefill_tokens) // num_parts),
        -(-int(work.prefill_pairs) // num_parts),
        -(-int(work.decode_requests) // num_parts),
        -(-int(work.context_tokens) // num_parts),
    )
    return step_s - costs.hop_s
