"""Counts of the legs that an instance holds."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from banaserve.serving.instances.inflight import Inflight, InflightLeg


class Counts:
    def __init__(self) -> None:
        self.now = Inflight()

    def add(self, leg: Inflight, sign: int) -> None:
        self.now = self.now.with_leg(leg, sign)


def test_a_leg_counts_with_its_prompt_until_that_is_computed() -> None:
    counts = Counts()
    other = InflightLeg(counts.add, 0, 50)
    leg = InflightLeg(counts.add, 300, 1000)
    # 300 tokens after 700: 300 (300 + 2 x 700) pairs.
    assert counts.now == Inflight(2, 1050, 1, 300, 300 * 1700)
    leg.prefilled()
    leg.prefilled()
    assert counts.now == Inflight(2, 1050)
    leg.end()
    other.end()
    assert counts.now == Inflight()
