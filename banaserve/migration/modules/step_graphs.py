"""CUDA graphs of the modules that a model has now, after some have been replaced.

Graphs of the modules at home are kept: they hold weights and KV that stay at their addresses.

The graphs of ``torch.compile`` hold the modules that existed when the graphs were made: modules
that replace these later are never called. Attentions are an exception: a graph only names them.
CUDA graphs are the same in both respects, but they can be captured again. A module that asks a
guest cannot be captured, since a graph that is replayed calls no Python: in a capture it becomes a
break, which every replay calls.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import nn

from banaserve.engine.compat.runner import graphs
from banaserve.engine.compat.runner.graphs import RunnerGraphs
from banaserve.engine.compat.runner.model import leave_graphs
from banaserve.migration.kv.slabs import no_wait

logger = logging.getLogger(__name__)

WANTED_STEPS = 3
"""Number of steps without a graph after which their graph is captured.

A capture takes as long as two steps without a graph, so rare sizes are not worth one.
"""


class StepGraphs:
    """Owner of a runner's graphs, of which only those that fit the model's modules are replayed.

    Steps whose graph has not been captured run without one. Graphs are captured between two steps,
    at most one before a step.
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


Given = Mapping[str, Any]


def is_capturing() -> bool:
    """Return whether the kernels of this thread are being captured instead of computing."""
    return graphs.capture_under_way() is not None


def call_in_break(call: Callable[[Given], Any], blank: Callable[[Given], Any], given: Given) -> Any:
    """Return ``call(given)``: a tensor or a tuple of tensors and None, with a row for each token.

    In a capture, the tensors of ``blank(given)`` are returned instead, and every replay copies into
    them what ``call(given)`` returns then. If that has fewer rows, as for a batch that is smaller
    than its graph, the other rows are zero.

    Args:
        blank: Function that returns new tensors like those of ``call`` without reading any: in a
            capture, tensors have no values yet.
        given: Values by name; in a capture tensors of the graph.
    """
    capture = graphs.capture_under_way()
    if capture is None:
        return call(given)
    # The graph owns the memory: a reference would keep later tensors from using it again.
    weak = {name: graphs.weakly(value) for name, value in given.items()}
    return capture.add_eager(_Break(lambda: call(weak), lambda: blank(weak)))


class _Break:
    """Callable of a graph; the first call is in the capture, and the others are in replays."""

    def __init__(self, call: Callable[[], Any], blank: Callable[[], Any]) -> None:
        self._call = call
        self._blank = blank
        self._static: Any = None

    def __call__(self) -> Any:
        if self._static is None:
            # Made here and not before: now nothing is captured, and the graph reads these.
            self._static = self._blank()
        else:
            for static, new in zip(_tuple(self._static), _tuple(self._call()), strict=True):
                _fill(static, new)
        return self._static


def _fill(static: torch.Tensor, new: torch.Tensor | None) -> None:
    num_rows = 0 if new is None else len(new)
    if new is not None:
        static[:num_rows].copy_(new)
    static[num_rows:].zero_()


def _tuple(values: Any) -> tuple[Any, ...]:
    return values if isinstance(values, tuple) else (values,)


class CompiledModel:
    """A model that runs as compiled code unless its modules have to be called."""

    def __init__(self, model: nn.Module, graphs: StepGraphs | None = None) -> None:
        self._model = model
        self._graphs = graphs
        self._reasons: set[str] = set()
        self._handle: Any = None

    def call_modules(self, reason: str, *, wanted: bool) -> None:
        """Add or remove a reason to call the modules one by one, from the next step on.

        CUDA graphs are captured for a set of reasons, which must therefore name what is replaced.
        """
        (self._reasons.add if wanted else self._reasons.discard)(reason)
        if self._reasons and self._handle is None:
            self._handle = leave_graphs(self._model)
        elif not self._reasons and self._handle is not None:
            self._handle.remove()
            self._handle = None
        if self._graphs is not None:
            self._graphs.replace(self._reasons)
