"""Files of traces and prompts: every bad line is one line that names it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given

from banaserve.base.errors import UserError
from banaserve.base.text import records
from banaserve.sim.trace import read_trace
from banaserve_bench.datasets.entries import read_entries
from banaserve_bench.simulation.lengths import read_lengths
from corpus import attempt, fuzzed, spoiled

pytestmark = pytest.mark.deep

READERS = (read_entries, read_trace, read_lengths)
SUFFIXES = (".jsonl", ".json", ".csv", ".jsonl.zst")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_is_read_or_one_line_says_what_is_wrong(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"trace{suffix}"
    if suffix.endswith(".zst"):
        pytest.importorskip("zstandard")

    @fuzzed
    @given(spoiled("traces"))
    def check(data: bytes) -> None:
        path.write_bytes(data)
        for read in READERS:
            found, error = attempt(lambda: read(path), UserError)  # noqa: B023
            if error is None:
                assert found
                continue
            assert "\n" not in str(error)
            assert str(path) in str(error)
            assert len(str(error)) < 1_000

    check()


def test_a_small_file_that_stands_for_a_huge_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zstandard = pytest.importorskip("zstandard")
    path = tmp_path / "bomb.jsonl.zst"
    path.write_bytes(zstandard.compress(b'{"prompt": "' + b"a" * 64 * 2**20 + b'"}'))
    assert path.stat().st_size < 2**20
    monkeypatch.setattr(records, "MAX_UNPACKED_BYTES", 8 * 2**20)
    with pytest.raises(UserError, match="is larger than 8388608 bytes unpacked: split it"):
        read_entries(path)
