"""Runs of bytes as copies of rows: few calls, every byte once."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from banaserve.transport.regions.gpu_memory import RowCopy, rows_of

FAR = 2**31
"""Least distance of rows that CUDA refuses."""


@pytest.mark.parametrize(
    ("target", "source", "rows"),
    [
        ([], [], []),
        ([5], [0], [RowCopy(5, 0, 0, 0, 8, 1)]),
        ([0, 8, 16], [40, 48, 56], [RowCopy(0, 40, 0, 0, 24, 1)]),
        ([0, 8, 16], [0, 32, 64], [RowCopy(0, 0, 8, 32, 8, 3)]),
        (
            [0, 8, 16, 24],
            [0, 8, 64, 72],
            [RowCopy(0, 0, 0, 0, 16, 1), RowCopy(16, 64, 0, 0, 16, 1)],
        ),
        ([16, 8], [0, 8], [RowCopy(16, 0, 0, 0, 8, 1), RowCopy(8, 8, 0, 0, 8, 1)]),
        ([0, 16], [0, FAR - 1], [RowCopy(0, 0, 16, FAR - 1, 8, 2)]),
        ([0, 16], [0, FAR], [RowCopy(0, 0, 0, 0, 8, 1), RowCopy(16, FAR, 0, 0, 8, 1)]),
    ],
)
def test_neighbours_and_equal_steps_are_joined(target, source, rows):
    found = rows_of(np.array(target, np.int64), np.array(source, np.int64), 8)
    assert list(found) == rows


@given(
    places=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=30),
    run_bytes=st.integers(1, 9),
)
def test_the_same_bytes_are_copied_as_run_by_run(places, run_bytes):
    pairs = {target * 7: source * 5 for target, source in places}
    target, source = (np.array(one, np.int64) for one in (list(pairs), list(pairs.values())))
    data, wanted, got = np.arange(400) % 251, np.full(400, -1), np.full(400, -1)
    whole = run_bytes > 7
    targets = target * 2 if whole else target
    data, wanted, got = (np.resize(one, 800) for one in (data, wanted, got))
    for to, at in zip(targets, source, strict=True):
        wanted[to : to + run_bytes] = data[at : at + run_bytes]
    for rows in rows_of(targets, source, run_bytes):
        for row in range(rows.num_rows):
            to, at = rows.target + row * rows.target_step, rows.source + row * rows.source_step
            got[to : to + rows.width_bytes] = data[at : at + rows.width_bytes]
    assert np.array_equal(got, wanted)


def test_no_runs_of_no_bytes_are_copied():
    assert list(rows_of(np.array([0, 5]), np.array([0, 5]), 0)) == []


def test_a_process_without_cuda_is_told_so():
    # In a process of its own: another test may have loaded the runtime into this one.
    body = "from banaserve.transport.regions.gpu_memory import CudaGpu; CudaGpu(0)"
    done = subprocess.run([sys.executable, "-P", "-c", body], capture_output=True, text=True)
    assert "RefusedError" in done.stderr
    assert "has not loaded CUDA's runtime" in done.stderr
