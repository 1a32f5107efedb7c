"""A short fuzz of csrc's boundaries; `make sanitize` makes a long one with the sanitizers."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

FUZZ = runpy.run_path(str(Path(__file__).parents[2] / "csrc" / "checks" / "fuzz.py"))


def test_copies_and_disk_transfers_do_what_their_models_say(
    capsys: pytest.CaptureFixture[str],
) -> None:
    FUZZ["main"](10, 1)
    assert "10 rounds of seed 1" in capsys.readouterr().out
