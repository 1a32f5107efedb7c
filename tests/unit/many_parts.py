"""How many parts pay is what a machine is fast at: here every step has as many as it may."""

from __future__ import annotations

from typing import Any

import numpy as np

from banaserve.engine.vllm.migration.microbatch.planner import PartPlan, plan_parts


def as_many_as_can_be(times: Any, stages: Any, seen: Any, most_parts: int) -> PartPlan:
    """In place of ``plan_parts``: cut between any two tokens, at places drawn by their number."""
    plan_parts(times, stages, seen, most_parts)
    inside = np.arange(1, len(seen))
    draw = np.random.default_rng(len(seen))
    cuts = draw.choice(inside, min(most_parts - 1, len(inside)), replace=False)
    sizes = np.diff([0, *np.sort(cuts), len(seen)])
    return PartPlan(tuple(int(size) for size in sizes), 1.0, 1.0)
