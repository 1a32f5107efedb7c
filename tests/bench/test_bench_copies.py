"""`bench copies`: a small run of all of it, and what it refuses."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from banaserve.base.errors import UserError
from banaserve_bench.results import result
from benchmarks import copies
from benchmarks.copies import MEMCPY, CopyBench


def test_a_small_run_has_every_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "_BLOCK_BYTES", (32 * 1024, 1024 * 1024))
    monkeypatch.setattr(copies, "_SAMPLE_BYTES", 2 * 1024 * 1024)
    monkeypatch.setattr(copies, "_RING_BYTES", 4 * 1024 * 1024)
    path = tmp_path / "copies.json"
    argv = ["--runs", "2", "--repeats", "1", "--json", str(path)]
    assert copies.main(argv) == 0
    figures = result.read(path).figures
    for name in ("copy_fraction", "copy_checksum_fraction", "copy_wall_fraction"):
        assert len(figures[name].samples) == 2
    for case in ("32kib_1t", "32kib_2t", "1024kib_1t", "1024kib_2t"):
        assert figures[f"copy_fraction_{case}"].min > 0
        assert figures[f"torch_fraction_{case}"].min > 0
    assert figures["copy_fraction"].max <= figures["copy_fraction_1024kib_1t"].max


def test_a_way_that_copies_something_else_is_noticed() -> None:
    bench = CopyBench(4096, 64 * 1024, 128 * 1024, seed=0)
    bench.ways = {MEMCPY: bench.ways[MEMCPY], "lazy": lambda first, end: None}
    with ThreadPoolExecutor(2) as pool, pytest.raises(UserError, match="lazy"):
        bench.run(pool, 2)


@pytest.mark.parametrize("argv", [["--runs", "0"], ["--repeats", "0"]])
def test_refusals(argv: list[str]) -> None:
    with pytest.raises(UserError, match="at least"):
        copies.main(argv)
