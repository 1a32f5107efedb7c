"""Trace of a step: when each layer was fetched, computed and saved. For measurements."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from enum import IntEnum
from math import nan

_KEPT_STEPS = 256


class Moment(IntEnum):
    """What is stamped for a layer, in the order in which it happens.

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
    """One step that moved blocks; times are seconds on the process's monotonic clock.

    Attributes:
        step: Number of the step.
        began_s: When the step began.
        forward_s: When the forward pass could begin: what was fetched before it is there.
        computed_s: When the forward pass had ended; then saves are waited for.
        ended_s: When everything had ended and was committed.
        layers: ``[num_layers][Moment]``, nan for what did not happen.
        fetched_blocks: Blocks that it fetched.
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
    """Keeps the last steps' traces, or nothing where it is off.

    Each stamp has a place of its own, so the threads that stamp need no lock.
    """

    enabled: bool
    num_layers: int = 0
    steps: deque[StepTrace] = field(default_factory=lambda: deque(maxlen=_KEPT_STEPS))
    _current: StepTrace | None = None

    def begin(self, step: int, began_s: float) -> None:
        if self.enabled:
            layers = [[nan] * len(Moment) for _ in range(self.num_layers)]
            self._current = StepTrace(step, began_s, layers, forward_s=began_s)

    def forward_begins(self) -> None:
        if self._current is not None:
            self._current.forward_s = time.perf_counter()

    def stamp(self, layer: int, moment: Moment) -> None:
        if self._current is not None:
            self._current.layers[layer][moment] = time.perf_counter()

    def end(self, computed_s: float, fetched_blocks: int) -> None:
        if self._current is not None:
            self._current.fetched_blocks = fetched_blocks
            self._current.computed_s = computed_s
            self._current.ended_s = time.perf_counter()
            self.steps.append(self._current)
            self._current = None
