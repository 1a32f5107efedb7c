"""Benchmark of time to first token with a cached prefix: lengths of the prefixes."""

from __future__ import annotations

import pytest

from benchmarks.prefix_ttft import whole_blocks


@pytest.mark.parametrize(("percent", "tokens"), [(0, 0), (50, 8 * 128), (90, 14 * 128)])
def test_shares_are_whole_blocks(percent: int, tokens: int) -> None:
    assert whole_blocks(2000, percent) == tokens
