"""What a guest takes from its machine, seen from outside: asking it would cost its host a step."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")
_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
_FIELD = re.compile(r"^(\w+):\s+(\d+) kB$", re.MULTILINE)


class Usage(NamedTuple):
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


def look(pid: int, last: Usage) -> Usage | None:
    """Read the kernel's accounts of a process; None where it has ended. Blocks for milliseconds."""
    try:
        fields = _stat(pid)
        num_bytes = 1024 * (_rollup(pid) + _status_kb(pid, "RssShmem"))
    except OSError:
        return None
    now_s, cpu_s = time.monotonic(), (int(fields[11]) + int(fields[12])) * _TICK_S
    elapsed_s = now_s - last.at_s
    busy = min(1.0, (cpu_s - last.cpu_s) / elapsed_s) if last.at_s and elapsed_s > 0 else 0.0
    return Usage(num_bytes, busy, cpu_s, now_s)


def is_stopped(pid: int) -> bool:
    """Whether a signal or a debugger has stopped the process."""
    try:
        return _stat(pid)[0] in ("T", "t")
    except OSError:
        return False


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on: the name before it may hold anything."""
    return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()


def _rollup(pid: int) -> int:
    found = dict(_FIELD.findall((_PROC / str(pid) / "smaps_rollup").read_text()))
    return int(found.get("Pss_Anon", 0))


def _status_kb(pid: int, name: str) -> int:
    found = dict(_FIELD.findall((_PROC / str(pid) / "status").read_text()))
    return int(found.get(name, 0))
