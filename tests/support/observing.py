"""What tests see of servers from outside: conditions that come true, writers of logs."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

DEADLINE_S = 180.0


def until(holds: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> float:
    """Poll until ``holds()``; returns the seconds that it took."""
    began_s = time.monotonic()
    while not holds():
        elapsed_s = time.monotonic() - began_s
        assert elapsed_s < deadline_s, f"not within {deadline_s:.0f} s: {what}"
        time.sleep(0.02)
    return time.monotonic() - began_s


def writers(run_dir: Path) -> Iterator[tuple[str, int]]:
    """Names of logs in ``run_dir`` with the processes that write them."""
    for process in psutil.process_iter():
        with contextlib.suppress(OSError):
            log = Path(os.readlink(f"/proc/{process.pid}/fd/1"))
            if log.parent == run_dir:
                yield log.name, process.pid


def huge_page_bytes(pid: int) -> int:
    """Memory of a process that lies in huge pages."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("AnonHugePages"))


def writer(run_dir: Path, name: str) -> int:
    """The process that writes ``name``.log: the oldest, where it has children."""
    found = [pid for log, pid in writers(run_dir) if log == f"{name}.log"]
    assert found, f"no process writes {name}.log"
    return found[0]
