"""What tests see of servers from outside: conditions that come true, writers of logs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from waiting import eventually

DEADLINE_S = 180.0


def until(holds: Callable[[], object], what: str, deadline_s: float = DEADLINE_S) -> float:
    """Wait as long as a server may take until ``holds``; returns the seconds that it took."""
    return eventually(holds, what, deadline_s)


def writers(run_dir: Path) -> Iterator[tuple[str, int]]:
    """Names of logs in ``run_dir`` with the processes that write them, the oldest first."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):
            log = Path(os.readlink(f"/proc/{process.pid}/fd/1"))
            if log.parent == run_dir:
                found.append((process.create_time(), process.pid, log.name))
    # Not by their ids, which begin anew at some number.
    yield from ((name, pid) for _, pid, name in sorted(found))


def huge_page_bytes(pid: int) -> int:
    """Memory of a process that lies in huge pages."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("AnonHugePages"))


def writer(run_dir: Path, name: str) -> int:
    """The process that writes ``name``.log: the oldest, where it has children."""
    found = [pid for log, pid in writers(run_dir) if log == f"{name}.log"]
    assert found, f"no process writes {name}.log"
    return found[0]
