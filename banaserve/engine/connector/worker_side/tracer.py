"""Trace of a step: when each layer was fetched, computed and saved. For measurements."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from enum import IntEnum
from math import nan

_KEPT_STEPS = 256


class TracePoint(IntEnum):
    """Points at which a layer is stamped, in the order in which they are reached.

    A layer computes from WAITED to the next layer's WAIT. On a GPU the copies and the forward pass
    are stamped when they are queued.
    """

    LOAD = 0
    LOADED = 1
    WAIT = 2
    WAITED = 3
    ATTENDED = 4
    SAVE = 5
    SAVED = 6


@dataclass(slots=True)
class StepTrace:
    """Trace of one step that copied blocks; times are seconds on the process's monotonic clock.

    Attributes:
        step: Number of the step.
        began_s: Begin of the step.
        forward_s: Time at which the forward pass could begin, its first fetches having ended.
        computed_s: End of the forward pass; the wait for saves follows.
        ended_s: Time at which all copies had ended and were committed.
        layers: Times ``[num_layers][TracePoint]``; nan for points that were not reached.
        fetched_blocks: Number of blocks that the step fetched.
    """

    step: int
    began_s: float
    layers: list[list[float]]
    forward_s: float = nan
    computed_s: float = nan
    ended_s: float = nan
    fetched_blocks: int = 0


@dataclass(slots=True)
class Tracer:
    """Recorder of the last steps' traces; records nothing where it is disabled.

    Each stamp has a place of its own, so the threads that stamp need no lock.
    """

    enabled: bool
    num_layers: int = 0
    steps: deque[StepTrace] = field(default_factory=lambda: deque(maxlen=_KEPT_STEPS))
    _current: StepTrace | None = None

    def begin(self, step: int, began_s: float) -> None:
        if self.enabled:
            layers = [[nan] * len(TracePoint) for _ in range(self.num_layers)]
            self._current = StepTrace(step, began_s, layers, forward_s=began_s)

    def forward_begins(self) -> None:
        if self._current is not None:
            self._current.forward_s = time.perf_counter()

    def stamp(self, layer: int, point: TracePoint) -> None:
        if self._current is not None:
            self._current.layers[layer][point] = time.perf_counter()

    def end(self, computed_s: float, fetched_blocks: int) -> None:
        if self._current is not None:
            self._current.fetched_blocks = fetched_blocks
            self._current.computed_s = computed_s
            self._current.ended_s = time.perf_counter()
            self.steps.append(self._current)
            self._current = None
