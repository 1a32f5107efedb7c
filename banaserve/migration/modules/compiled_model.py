"""A compiled model whose layers run one by one while some of them are replaced.

The graphs of ``torch.compile`` hold the modules that existed when the graphs were made: modules
that replace these later are never called. Attentions are an exception: a graph only names them.
CUDA graphs are the same in both respects, but they can be captured again (``step_graphs``).
"""

from __future__ import annotations

from typing import Any

from torch import nn

from banaserve.engine.compat.runner.model import leave_graphs
from banaserve.migration.modules.step_graphs import StepGraphs


class CompiledModel:
    """A model that runs as compiled code unless its modules have to be called.

    Args:
        model: Model with or without compiled graphs.
        graphs: CUDA graphs of the model; None if there are none.
    """

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
