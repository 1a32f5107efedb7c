"""Resource use of processes by the kernel's own accounts: memory, CPU time, waiting for CPUs.

A guest is not asked, since its answer would cost its host a step.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")
_LEAST_RUN_S = 0.01
"""Below it an interval says nothing."""


class _Spent(NamedTuple):
    run_s: float = 0.0
    waited_s: float = 0.0


class CoreWaits:
    """Looks at one process after another incarnation of it: whichever it is asked about."""

    def __init__(self) -> None:
        self._pid = 0
        self._last: dict[str, _Spent] = {}

    def slow_down(self, pid: int) -> float | None:
        """How many times as long as on idle processors its threads have taken since the last call.

        Time in which a thread could have run and did not counts as waited, whoever ran. None where
        it has hardly run, has just been seen first, or the kernel does not tell. Blocks for less
        than a millisecond.
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


_PROC_FS = Path("/proc")
_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
_FIELD = re.compile(r"^(\w+):\s+(\d+) kB$", re.MULTILINE)


class ProcessUsage(NamedTuple):
    """Of one process.

    Attributes:
        num_bytes: Memory of its own: private pages, its part of those it shares with the process
            that it was forked from, and all shared memory that it holds KV in.
        busy_fraction: CPU time against wall time since the last look, in [0, 1].
        cpu_s: CPU time since it began.
        at_s: When this was seen, on the monotonic clock.
    """

    num_bytes: int = 0
    busy_fraction: float = 0.0
    cpu_s: float = 0.0
    at_s: float = 0.0


def look(pid: int, last: ProcessUsage) -> ProcessUsage | None:
    """Read the kernel's accounts of a process; None where it has ended. Blocks for milliseconds."""
    try:
        fields = _stat(pid)
        num_bytes = 1024 * (_rollup(pid) + _status_kb(pid, "RssShmem"))
    except OSError:
        return None
    now_s, cpu_s = time.monotonic(), (int(fields[11]) + int(fields[12])) * _TICK_S
    elapsed_s = now_s - last.at_s
    busy = min(1.0, (cpu_s - last.cpu_s) / elapsed_s) if last.at_s and elapsed_s > 0 else 0.0
    return ProcessUsage(num_bytes, busy, cpu_s, now_s)


def is_stopped(pid: int) -> bool:
    """Whether a signal or a debugger has stopped the process."""
    try:
        return _stat(pid)[0] in ("T", "t")
    except OSError:
        return False


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on: the name before it may hold anything."""
    return (_PROC_FS / str(pid) / "stat").read_text().rpartition(")")[2].split()


def _rollup(pid: int) -> int:
    found = dict(_FIELD.findall((_PROC_FS / str(pid) / "smaps_rollup").read_text()))
    return int(found.get("Pss_Anon", 0))


def _status_kb(pid: int, name: str) -> int:
    found = dict(_FIELD.findall((_PROC_FS / str(pid) / "status").read_text()))
    return int(found.get(name, 0))
