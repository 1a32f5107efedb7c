"""Waits that consist of short ones."""

from __future__ import annotations

import pytest

from banaserve.base.clock import wait_parts


@pytest.mark.parametrize("total_s", [0.0, 0.1, 0.25, 1.0, 7.7, 30.0, 1e6])
def test_short_waits_last_as_long_as_the_whole(total_s: float) -> None:
    parts = list(wait_parts(total_s))
    assert sum(parts) == pytest.approx(total_s)
    assert len(parts) <= 41
    assert total_s <= 0.25 or max(parts) <= total_s / 4 + 1e-9


def test_a_deadline_that_has_passed_is_one_wait_of_no_length() -> None:
    assert list(wait_parts(-3.0)) == [0.0]
