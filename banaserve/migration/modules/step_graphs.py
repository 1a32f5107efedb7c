"""CUDA graphs of the modules that a model has now, after some have been replaced.

Graphs of the modules at home are kept: they hold weights and KV that stay at their addresses.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Set as AbstractSet
from typing import Any

from banaserve.engine.compat.runner.graphs import RunnerGraphs
from banaserve.migration.kv.device_wait import no_wait

logger = logging.getLogger(__name__)

WANTED_STEPS = 3
"""Number of steps without a graph after which their graph is captured.

A capture takes as long as two steps without a graph, so rare sizes are not worth one.
"""


class StepGraphs:
    """Owner of a runner's graphs, of which only those that fit the model's modules are replayed.

    Steps whose graph has not been captured run without one. Graphs are captured between two steps,
    at most one before a step.

    Attributes:
        num_captured: Number of graphs captured so far.
    """

    def __init__(self, graphs: RunnerGraphs) -> None:
        self.num_captured = 0
        self._graphs = graphs
        self._replaced: AbstractSet[str] = frozenset()
        self._at_home: dict[Any, Any] = {}
        self._wanted: Counter[int] = Counter()
        self._has_failed = False
        self._is_capturing = False
        graphs.gate(self._may_replay)

    @property
    def sizes(self) -> list[int]:
        """Return the numbers of tokens of the graphs that fit the model's modules, ascending."""
        return sorted(self._graphs.sizes())

    def replace(self, replaced: AbstractSet[str]) -> None:
        """Stop replaying graphs of modules that the model no longer has.

        Args:
            replaced: Names of what has been replaced in the model; empty if all modules are its
                own. Graphs of equal sets fit each other.
        """
        if replaced == self._replaced:
            return
        before = self._graphs.exchange({} if replaced else self._at_home)
        if not self._replaced:
            self._at_home = before
        elif not replaced:
            self._at_home = {}
        self._replaced = frozenset(replaced)
        self._wanted.clear()
        self._has_failed = False

    def capture_wanted(self) -> None:
        """Capture the graph that most steps have lacked, if any; call between two steps."""
        if not self._wanted or self._has_failed:
            return
        [(num_tokens, num_steps)] = self._wanted.most_common(1)
        if num_steps < WANTED_STEPS:
            return
        del self._wanted[num_tokens]
        began_s = time.perf_counter()
        self._is_capturing = True
        try:
            with no_wait():
                self._graphs.capture(num_tokens)
        except RuntimeError as failed:
            self._has_failed = True
            logger.warning("steps run without CUDA graphs until modules move again: %s", failed)
            return
        finally:
            self._is_capturing = False
        self.num_captured += 1
        taken_ms = (time.perf_counter() - began_s) * 1e3
        logger.info("captured the graph of %d tokens in %.0f ms", num_tokens, taken_ms)

    def _may_replay(self, num_tokens: int) -> bool:
        """Return whether a step may replay its graph, and note a graph that is missing."""
        if not self._replaced or self._is_capturing or num_tokens in self._graphs.sizes():
            return True
        self._wanted[num_tokens] += 1
        return False
