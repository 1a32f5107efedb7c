"""What ``bench handover-moved`` makes of its passes, and what it refuses."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime

import pytest

from banaserve.base.errors import UserError
from benchmarks import handover_moved
from benchmarks.handover_moved import MovedRun


def run_of(host_bytes: float, guest_bytes: float, ttft_s: float, answer: int) -> MovedRun:
    return MovedRun(host_bytes, guest_bytes, 0.002, 0.001, ttft_s, 0.05, [[1, 2], [3, answer]])


def test_bytes_that_are_not_sent_and_answers_that_differ_are_told() -> None:
    runs = {
        "guest": [run_of(60.0, 60.0, 2.0, 4), run_of(60.0, 60.0, 3.0, 4)],
        "host": [run_of(120.0, 0.0, 4.0, 4), run_of(120.0, 0.0, 3.0, 5)],
    }
    given = argparse.Namespace(runs=2, json=None)
    figures = handover_moved._result(given, datetime.now(UTC), runs).figures
    assert figures["host_bytes_ratio"].samples == [0.5, 0.5]
    assert figures["ttft_ratio"].samples == [0.5, 1.0]
    assert figures["equal_answers_fraction"].samples == [0.75]
    assert figures["guest_saves.guest_bytes"].samples == [60.0, 60.0]
    assert figures["host_saves.save_wait"].samples == [1.0, 1.0]


@pytest.mark.parametrize("argv", [["--layers", "30"], ["--output-tokens", "1"]])
def test_what_cannot_be_measured_is_refused(argv: list[str]) -> None:
    with pytest.raises(UserError, match="--layers is below 30, --output-tokens at least 2"):
        handover_moved.main(argv)
