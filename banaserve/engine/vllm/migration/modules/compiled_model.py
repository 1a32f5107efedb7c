"""A compiled model whose layers run one by one while something else stands in their places.

The graphs of ``torch.compile`` hold the modules that were there when they were made: what the model
has been given since is never called. Attentions are an exception, since a graph only names them.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from banaserve.engine.vllm.compat.model import leave_graphs


class CompiledModel:
    """Runs as compiled code as long as nobody needs it to call its modules.

    Args:
        model: With or without graphs.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._reasons: set[str] = set()
        self._handle: Any = None

    def call_modules(self, reason: str, *, wanted: bool) -> None:
        """Call the modules one by one from the next step on, or no longer for this reason."""
        (self._reasons.add if wanted else self._reasons.discard)(reason)
        if self._reasons and self._handle is None:
            self._handle = leave_graphs(self._model)
        elif not self._reasons and self._handle is not None:
            self._handle.remove()
            self._handle = None
