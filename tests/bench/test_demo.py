"""The demonstration says who was in time, or why nothing can be said."""

from __future__ import annotations

import pytest

from banaserve.base.errors import UserError
from benchmarks import demo
from benchmarks.demo import DemoRun, verdict

WON = DemoRun(570, 520, 0, 0.011, 80.0, 0.5)
LOST = DemoRun(570, 310, 0, 0.004, 80.0, 0.5)


def test_the_last_line_has_both_counts() -> None:
    line = verdict(WON, LOST, 2.0, 0.1)
    assert "520 of 570 requests with roles that follow the load" in line
    assert "310 of 570 with fixed roles" in line
    assert line.endswith("1.1% of the steps late")


def test_a_loss_is_said_with_what_would_change_it() -> None:
    line = verdict(LOST, WON, 2.0, 0.1)
    assert "310 of 570 requests with roles that follow" in line
    assert line.endswith("changes of roles did not pay in phases as short as these (--phase-s)")


@pytest.mark.parametrize("late", [(0.031, 0.0), (0.0, 0.2)])
def test_there_is_no_verdict_on_a_machine_that_is_too_slow(late: tuple[float, float]) -> None:
    line = verdict(
        WON._replace(late_fraction=late[0]), LOST._replace(late_fraction=late[1]), 2.0, 0.1
    )
    assert line.startswith(f"no verdict: {max(late):.1%} of the steps")
    assert "520" not in line


@pytest.mark.parametrize("options", [("--dilate", "0"), ("--phase-s", "0.5")])
def test_options_that_make_no_sense(options: tuple[str, str]) -> None:
    with pytest.raises(UserError, match=options[0]):
        demo.main(options)
