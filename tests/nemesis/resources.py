"""What a server's processes hold over hours, and whether it grows. The judgement is pure."""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import linear_regression, median

import httpx

SLACK = {"bytes": 24 << 20, "descriptors": 8, "threads": 4, "series": 0, "files": 4, "log_bytes": 0}
"""By which a quantity may differ between two quarters of a run, beside a twentieth of it."""
_FEWEST = 16


@dataclass
class Resources:
    """Samples over time.

    Attributes:
        seen: By quantity, such as ``front bytes``: seconds since the start, and its value.
    """

    seen: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))

    def note(self, at_s: float, found: Mapping[str, float]) -> None:
        for name, value in found.items():
            self.seen[name].append((at_s, value))


def looked_at(
    pids: Mapping[str, int], run_dir: Path, temp_dir: Path, url: str, max_log_bytes: int
) -> dict[str, float]:
    """What the processes hold now, what the run's folders hold, and how long its metrics are.

    Args:
        pids: By their names; 0 for one that is not there.
        url: Of a server that may be busy; then its metrics are left out.
        max_log_bytes: At which a log is moved to ``LOG.1``. One that is shorter than two such files
            counts as two: until then it may grow.
    """
    found: dict[str, float] = {}
    for name, pid in pids.items():
        if pid:
            found.update({f"{name} {what}": value for what, value in _held(pid)})
    found["run folder log_bytes"] = sum(
        max(2 * max_log_bytes, sum(file.stat().st_size for file in run_dir.glob(f"{log.name}*")))
        for log in run_dir.glob("*.log")
    )
    found["temporary files"] = sum(1 for _ in temp_dir.rglob("*"))
    with contextlib.suppress(httpx.HTTPError):
        page = httpx.get(f"{url}/metrics", timeout=30.0)
        if page.status_code == 200:
            lines = page.text.splitlines()
            found["metric series"] = sum(1 for line in lines if not line.startswith("#"))
    return found


def _held(pid: int) -> Iterator[tuple[str, float]]:
    """Bytes of its own, descriptors and threads of a process; nothing of one that ends."""
    place = Path(f"/proc/{pid}")
    with contextlib.suppress(OSError):
        rows = [line.split() for line in (place / "smaps_rollup").read_text().splitlines()]
        private = sum(int(row[1]) for row in rows if row[0] in ("Private_Clean:", "Private_Dirty:"))
        yield "bytes", private * 1024
        yield "descriptors", len(os.listdir(place / "fd"))
        yield "threads", len(os.listdir(place / "task"))


def grown(seen: Mapping[str, Sequence[tuple[float, float]]]) -> list[str]:
    """Quantities that were larger in the last quarter than in the second, beyond chance.

    The first quarter is left out: caches fill, and every kind of request is met once. Middle values
    of quarters are compared, since a process that has just been started again holds less.
    """
    found = []
    for name, samples in seen.items():
        if len(samples) < _FEWEST:
            continue
        second, last = _quarter(samples, 1), _quarter(samples, 3)
        if last > second * 1.05 + SLACK[name.rpartition(" ")[2]]:
            found.append(f"{name}: {second:.0f} in the second quarter, {last:.0f} in the last")
    return found


def _quarter(samples: Sequence[tuple[float, float]], number: int) -> float:
    size = len(samples) // 4
    return median(value for _, value in samples[number * size : (number + 1) * size])


def slopes(seen: Mapping[str, Sequence[tuple[float, float]]]) -> Iterator[str]:
    """A line a quantity: its middle value, and its growth an hour, without the first quarter."""
    for name, samples in sorted(seen.items()):
        late = samples[len(samples) // 4 :]
        if len(late) >= _FEWEST // 2:
            hours = [at_s / 3600 for at_s, _ in late]
            values = [value for _, value in late]
            slope = linear_regression(hours, values).slope
            yield f"{name:28} {median(values):14,.0f} {slope:+14,.0f} an hour"
