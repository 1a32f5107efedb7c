"""Resource use of processes by the kernel's own accounts: memory, CPU time, waiting for CPUs.

A guest is not asked, since its answer would cost its host a step.
"""

from __future__ import annotations

import contextlib
import re
import time
from pathlib import Path
from typing import NamedTuple

import psutil

from banaserve.kvstore.pool import POOL_NAME

_PROC = Path("/proc")
_FIELD = re.compile(r"^(\w+):\s+(\d+) kB$", re.MULTILINE)
_LEAST_RUN_S = 0.01
"""Minimum run time for a meaningful measurement, in seconds."""


class _Spent(NamedTuple):
    run_s: float = 0.0
    waited_s: float = 0.0


class CoreWaits:
    """Measurement of an instance's waits for CPUs; a new process id begins a new measurement."""

    def __init__(self) -> None:
        self._pid = 0
        self._last: dict[str, _Spent] = {}

    def slow_down(self, pid: int) -> float | None:
        """Return the run time of a process's threads since the last call, relative to idle CPUs.

        Time in which a thread was ready but did not run counts as waited, no matter what ran
        instead. None if the process has hardly run, is measured for the first time, or the kernel
        gives no accounts. Blocks for less than a millisecond.
        """
        seen = _threads(pid)
        before, self._last = (self._last if pid == self._pid else {}), seen
        self._pid = pid
        known = [(before[name], now) for name, now in seen.items() if name in before]
        run_s = sum(now.run_s - then.run_s for then, now in known)
        if run_s < _LEAST_RUN_S:
            return None
        return 1.0 + sum(now.waited_s - then.waited_s for then, now in known) / run_s


def _threads(pid: int) -> dict[str, _Spent]:
    found: dict[str, _Spent] = {}
    with contextlib.suppress(OSError):
        for thread in (_PROC / str(pid) / "task").iterdir():
            with contextlib.suppress(OSError, ValueError):
                run_ns, waited_ns, _ = (thread / "schedstat").read_text().split()
                found[thread.name] = _Spent(1e-9 * int(run_ns), 1e-9 * int(waited_ns))
    return found


class ProcessUsage(NamedTuple):
    """Resource use of one process.

    Attributes:
        num_bytes: Memory of its own, in bytes: private pages, its part of pages shared with the
            process that it was forked from, and all shared memory except the store's pool.
        busy_fraction: CPU time as a fraction of wall time since the last look, in [0, 1].
        cpu_s: CPU time since the start of the process, in seconds.
        at_s: Time of this measurement, on the monotonic clock, in seconds.
    """

    num_bytes: int = 0
    busy_fraction: float = 0.0
    cpu_s: float = 0.0
    at_s: float = 0.0


def look(pid: int, last: ProcessUsage) -> ProcessUsage | None:
    """Read the kernel's accounts of a process; None if it has ended. Blocks for milliseconds."""
    try:
        used = psutil.Process(pid).cpu_times()
        private_kb = _kilobytes(pid, "smaps_rollup", "Pss_Anon")
        shared_bytes = 1024 * _kilobytes(pid, "status", "RssShmem") - _pool_bytes(pid)
        num_bytes = 1024 * private_kb + max(0, shared_bytes)
    except (OSError, psutil.Error):
        return None
    now_s, cpu_s = time.monotonic(), used.user + used.system
    elapsed_s = now_s - last.at_s
    busy = min(1.0, (cpu_s - last.cpu_s) / elapsed_s) if last.at_s and elapsed_s > 0 else 0.0
    return ProcessUsage(num_bytes, busy, cpu_s, now_s)


def is_stopped(pid: int) -> bool:
    """Return whether a signal or a debugger has stopped the process."""
    try:
        status = psutil.Process(pid).status()
    except psutil.Error:
        return False
    return status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


def _kilobytes(pid: int, account: str, name: str) -> int:
    found = dict(_FIELD.findall((_PROC / str(pid) / account).read_text()))
    return int(found.get(name, 0))


def _pool_bytes(pid: int) -> int:
    """Return the size of the store's pool as the process has mapped it.

    A client maps all pages of the pool soon after it attaches (`PoolView.populate_in_background`).
    """
    maps = (_PROC / str(pid) / "maps").read_text()
    ends = (line.split("-", 1) for line in maps.splitlines() if f"/memfd:{POOL_NAME} " in line)
    return sum(int(end.split(" ", 1)[0], 16) - int(begin, 16) for begin, end in ends)
