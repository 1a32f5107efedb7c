"""Decision log: bounded in memory, and complete in a file if one is requested."""

from __future__ import annotations

import logging
import os
from collections import deque
from pathlib import Path

import msgspec

from banaserve.base.errors import UserError
from banaserve.contracts.control_api import DecisionRecord

logger = logging.getLogger(__name__)

KEPT = 500


class DecisionLog:
    """Log of the last decisions.

    A turn whose decision equals the previous one except for its numbers replaces it and is counted.
    A decision is written to the file when it differs, and again when one of its steps has ended.

    Args:
        path: File to which JSON lines are appended; None for no file.
        kept: Number of decisions kept in memory.

    Attributes:
        problem: Reason why the file is incomplete; empty while it is complete.

    Raises:
        UserError: The file cannot be written.
    """

    def __init__(self, path: Path | None = None, kept: int = KEPT) -> None:
        self.problem = ""
        self._kept: deque[DecisionRecord] = deque(maxlen=kept)
        self._path = path
        self._number = 0
        if path is not None:
            try:
                _append(path, b"")
            except OSError as error:
                raise UserError(f"--decision-log {path}: {error.strerror}") from error

    @property
    def num_decisions(self) -> int:
        return self._number

    def last(self, count: int | None = None) -> list[DecisionRecord]:
        """Return the last ``count`` decisions, or all that are kept, the oldest first."""
        kept = list(self._kept)
        return kept if count is None else kept[max(0, len(kept) - count) :]

    def add(self, decision: DecisionRecord) -> DecisionRecord:
        """Add a decision; return the decision that is kept, with its number."""
        last = self._kept[-1] if self._kept else None
        if last is not None and _gist(last) == _gist(decision):
            decision.number, decision.turns = last.number, last.turns + 1
            self._kept[-1] = decision
            return decision
        self._number += 1
        decision.number = self._number
        self._kept.append(decision)
        self.write(decision)
        return decision

    def write(self, decision: DecisionRecord) -> None:
        """Append the present state of a decision to the file; a full disk ends only the file."""
        if self._path is None:
            return
        try:
            _append(self._path, msgspec.json.encode(decision) + b"\n")
        except OSError as error:
            self.problem = error.strerror or str(error)
            logger.error("the decision log %s ends here: %s", self._path, error)
            self._path = None


def _append(path: Path, line: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    with os.fdopen(descriptor, "ab") as file:
        file.write(line)


def _gist(decision: DecisionRecord) -> tuple[object, ...]:
    """Return the key by which decisions are equal; one that has begun a step equals no other."""
    begun = [id(step) for step in decision.steps if not step.held]
    held = [(step.what, step.held) for step in decision.steps]
    rejected = sorted((one.candidate, one.reason) for one in decision.rejected)
    return (
        decision.mode,
        decision.policy,
        decision.is_balancing,
        decision.reason,
        decision.left_out,
        bool(decision.back_pressure),
        begun,
        held,
        rejected,
    )
