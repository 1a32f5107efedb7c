"""How many parts pay is what a machine is fast at: here every step has as many as it may."""

from __future__ import annotations

from typing import Any

import numpy as np

from banaserve.migration.microbatch.planner import MicroBatchPlan, plan_microbatches


def as_many_as_can_be(times: Any, stages: Any, seen: Any, max_microbatches: int) -> MicroBatchPlan:
    """In place of ``plan_microbatches``: cut between any two tokens, drawn by their number."""
    plan_microbatches(times, stages, seen, max_microbatches)
    inside = np.arange(1, len(seen))
    draw = np.random.default_rng(len(seen))
    cuts = draw.choice(inside, min(max_microbatches - 1, len(inside)), replace=False)
    sizes = np.diff([0, *np.sort(cuts), len(seen)])
    return MicroBatchPlan(tuple(int(size) for size in sizes), 1.0, 1.0)
