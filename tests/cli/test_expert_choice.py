"""Experts that take a share of a layer's work along."""

from __future__ import annotations

import random

import pytest

from banaserve.cli.admin.migrate import experts_for
from depth import seeds


@pytest.mark.parametrize(
    ("chosen", "share", "expected"),
    [
        pytest.param([0, 0, 0], 0.5, (), id="nothing was chosen"),
        pytest.param([10, 10, 10, 10], 0.5, (0, 1), id="all alike"),
        pytest.param([70, 10, 10, 10], 0.7, (0,), id="one that is hot is enough"),
        pytest.param([70, 10, 10, 10], 0.3, (1, 2, 3), id="one that is hot is too much"),
        pytest.param([90, 10, 0], 0.02, (1,), id="at least one: the one that is nearest"),
        pytest.param([50, 30, 20], 1.0, (0, 1, 2), id="all of the work"),
        pytest.param([60, 40, 0], 1.0, (0, 1), id="those that are never chosen stay"),
        pytest.param([50, 29, 21], 0.45, (0,), id="as near with fewer"),
        pytest.param([5], 0.5, (0,), id="a single expert"),
    ],
)
def test_experts_by_load(chosen: list[int], share: float, expected: tuple[int, ...]) -> None:
    assert experts_for(chosen, share) == expected


@pytest.mark.parametrize("seed", seeds(50, 50))
def test_no_expert_less_or_more_comes_closer(seed: int) -> None:
    draw = random.Random(seed)
    chosen = [draw.choice((0, 1, 5, 20, 100)) for _ in range(draw.randint(1, 40))]
    share = draw.uniform(0.01, 1.0)
    total = sum(chosen)
    found = experts_for(chosen, share)
    assert bool(found) == bool(total)
    away = abs(sum(chosen[expert] for expert in found) - share * total)
    assert list(found) == sorted(set(found))
    assert all(chosen[expert] for expert in found)
    if not found:
        return
    assert away <= max(chosen) / 2 or len(found) == 1
    left = [chosen[e] for e in range(len(chosen)) if e not in found and chosen[e]]
    for one in left:
        assert away <= abs(sum(chosen[e] for e in found) + one - share * total)
    for one in chosen:
        assert away <= abs(one - share * total) or not one
