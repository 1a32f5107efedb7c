"""What modules of other instances take of an instance's device."""

from __future__ import annotations

from pathlib import Path

from banaserve.engine.vllm.pacing.step_log import StepReader, readers

_LOOK_S = 1.0
"""How often to look for instances that have started."""


class Lodgers:
    """Reads what their hosts record.

    Args:
        folder: Where all instances record their steps.
        instance_id: Whose device it is.
    """

    def __init__(self, folder: Path, instance_id: str) -> None:
        self._folder = folder
        self._id = instance_id
        self._logs: list[StepReader] = []
        self._seen_s: dict[str, float] = {}
        self._looked_s = float("-inf")

    def taken(self, now_s: float) -> float:
        """Returns the seconds that they have taken since the last call."""
        if now_s - self._looked_s >= _LOOK_S:
            self._looked_s = now_s
            self._logs = [log for log in readers(self._folder) if log.instance_id != self._id]
        taken_s = 0.0
        for log in self._logs:
            total_s = log.taken(self._id)
            taken_s += total_s - self._seen_s.get(log.instance_id, total_s)
            self._seen_s[log.instance_id] = total_s
        return max(0.0, taken_s)
