"""What the page's benchmark makes of its runs."""

from __future__ import annotations

from argparse import Namespace
from datetime import UTC, datetime

import pytest

from banaserve.frontdoor.page.page import page_files
from benchmarks.registry import BENCHMARKS
from benchmarks.ui import _result


def test_figures_of_two_runs():
    given = Namespace(runs=2, seconds=1.0, streams=4, requests=8, pd="1:1")
    record = _result(
        given,
        datetime.now(UTC),
        {0: [0.004, 0.006], 1: [0.01, 0.01], 5: [0.014, 0.026]},
        {0: [0.010, 0.020], 5: [0.011, 0.019]},
        [0.1, 0.2],
    )
    figures = record.figures
    assert figures["page_bytes"].median == sum(len(one.body) for one in page_files().values())
    assert figures["cpu_added_by_5"].samples == pytest.approx([0.01, 0.02])
    assert figures["gap_p99_ratio_5"].samples == pytest.approx([1.1, 0.95])
    assert BENCHMARKS["ui"].module == "benchmarks.ui"
