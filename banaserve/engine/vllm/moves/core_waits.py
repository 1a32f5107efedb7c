"""How long a process waits for processors that others have, by the kernel's own accounts."""

from __future__ import annotations

import contextlib
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
