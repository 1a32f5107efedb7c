"""Starts the kernels' tests in Triton's interpreter, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from depth import IS_LONG

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "interpreted"

pytest.importorskip("triton")


@pytest.mark.room
@pytest.mark.early
def test_the_triton_kernels_are_right_in_the_interpreter() -> None:
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    chosen = [] if IS_LONG else ["-m", "not long"]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            *chosen,
            str(FOLDER),
        ],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
