"""Steps of one paced instance, in a file that its worker writes and other processes map to read.

The file holds sums from the instance's first incarnation on, the time that its modules take of
other instances' devices, and the last steps individually. Each number has one writer and is written
atomically; a step is counted once it is written.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

SUFFIX = ".steps"
KEPT_STEPS = 8192
_MAX_TARGETS = 32
_NAME_BYTES = 24

_LAYOUT = np.dtype(
    [
        ("version", "<f8"),
        ("dilation", "<f8"),
        ("num_steps", "<f8"),
        ("num_overrun", "<f8"),
        ("modelled_s", "<f8"),
        ("late_s", "<f8"),
        ("targets", [("name", f"S{_NAME_BYTES}"), ("seconds", "<f8")], (_MAX_TARGETS,)),
        ("steps", "<f8", (KEPT_STEPS, 6)),
    ]
)
_VERSION = 1.0


class PacedStep(NamedTuple):
    """A paced step; all times are wall time, dilation included.

    Attributes:
        began_s: Time at which the step should have begun, on the machine's monotonic clock.
        modelled_s: Seconds that the step should have taken.
        worked_s: Seconds that its real work took, the engine's own code before it included.
        took_s: Seconds until the step's output was released.
        prefill_tokens: Number of prompt tokens computed.
        decode_requests: Number of requests that got one token.
    """

    began_s: float
    modelled_s: float
    worked_s: float
    took_s: float
    prefill_tokens: float
    decode_requests: float


class StepSums(NamedTuple):
    """Sums over an instance's steps; all times are wall time, dilation included."""

    num_steps: int
    num_overrun: int
    modelled_s: float
    late_s: float


class StepLog:
    """Writer of an instance's file, in its worker.

    Args:
        path: Path of the file, which an earlier incarnation of the instance may have left.
    """

    def __init__(self, path: Path, dilation: float) -> None:
        if not path.exists() or path.stat().st_size != _LAYOUT.itemsize:
            scratch = path.with_suffix(".new")
            with scratch.open("wb") as file:
                file.truncate(_LAYOUT.itemsize)
            scratch.replace(path)
        self._all = np.memmap(path, _LAYOUT, "r+", shape=(1,))[0]
        self._all["version"] = _VERSION
        self._all["dilation"] = dilation

    def add(self, step: PacedStep, overran: bool) -> None:
        """Record a step that has ended."""
        log = self._all
        number = int(log["num_steps"])
        log["steps"][number % KEPT_STEPS] = step
        log["num_overrun"] += overran
        log["modelled_s"] += step.modelled_s
        log["late_s"] += max(0.0, step.took_s - step.modelled_s)
        log["num_steps"] = number + 1

    def take(self, target: str, seconds: float) -> None:
        """Add ``seconds`` for which modules of this instance have used ``target``'s device."""
        table = self._all["targets"]
        name = target.encode()
        for row in range(_MAX_TARGETS):
            if table["name"][row] in (name, b""):
                table["name"][row] = name
                table["seconds"][row] += seconds
                return


class StepReader:
    """Reader of the file of one instance.

    Raises:
        OSError, ValueError: The file does not exist, or is not complete yet.
    """

    def __init__(self, path: Path) -> None:
        self.instance_id = path.name.removesuffix(SUFFIX)
        self._all = np.memmap(path, _LAYOUT, "r", shape=(1,))[0]

    @property
    def dilation(self) -> float:
        return float(self._all["dilation"])

    def sums(self) -> StepSums:
        log = self._all
        return StepSums(
            int(log["num_steps"]),
            int(log["num_overrun"]),
            float(log["modelled_s"]),
            float(log["late_s"]),
        )

    def steps(self, since: int = 0) -> list[PacedStep]:
        """Return the steps from number ``since`` on, as far as they are kept."""
        end = int(self._all["num_steps"])
        numbers = range(max(since, end - KEPT_STEPS + 1), end)
        rows = self._all["steps"]
        return [PacedStep(*(float(v) for v in rows[n % KEPT_STEPS])) for n in numbers]

    def taken(self, target: str) -> float:
        """Return the seconds for which this instance's modules have used ``target``'s device."""
        table = self._all["targets"]
        return float(table["seconds"][table["name"] == target.encode()].sum())


def readers(folder: Path) -> Iterator[StepReader]:
    """Yield a reader for every instance that has a file in ``folder``."""
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        try:
            yield StepReader(path)
        except (OSError, ValueError):
            continue  # being written for the first time
