"""Processes of benchmarks that work on several cores."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

PROGRAM = """
import os, signal, sys
from benchmarks.workers import workers

def begin(_):
    os.write(1, b"%d\\n" % os.getpid())  # in one piece: both write to one pipe
    signal.alarm(600), signal.pause()

if __name__ == "__main__":
    with workers(2) as pool:
        list(pool.map(begin, range(2)))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_workers_end_with_a_benchmark_that_is_killed(tmp_path: Path, number: int) -> None:
    script = tmp_path / "script.py"
    script.write_text(PROGRAM)
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(root)},
    ) as parent:
        assert parent.stdout is not None
        try:
            found = [psutil.Process(int(parent.stdout.readline())) for _ in range(2)]
            assert all(one.is_running() for one in found)
            parent.send_signal(number)
            _, left = psutil.wait_procs(found, timeout=60.0)
            assert left == []
        finally:
            parent.kill()
