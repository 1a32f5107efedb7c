"""Backends of structured outputs: each request uses the one that it was checked with."""

from __future__ import annotations

import copy
import threading
from typing import Any

from vllm.v1.engine import core
from vllm.v1.structured_output import StructuredOutputManager


class BackendsByRequest(StructuredOutputManager):
    """Manager that compiles each grammar with the backend that the front door found for it.

    vLLM's manager keeps the backend of its first request: the grammars that an engine can compile
    would depend on its earlier requests, and differ between the engines of a request's legs. All
    backends fill masks of the same form.
    """

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        self._backends: dict[str | None, Any] = {}
        self._choosing = threading.RLock()

    def grammar_init(self, request: Any) -> None:
        if request.structured_output_request is None:
            return
        name = _backend_name(request)
        with self._choosing:
            self.backend = self._backends.get(name)
            super().grammar_init(request)  # makes the backend where there is none
            self._backends[name] = self.backend

    def _create_grammar(self, request: Any) -> Any:
        """Compile on a thread, while ``grammar_init`` may handle other requests."""
        chosen = copy.copy(self)
        with self._choosing:
            chosen.backend = self._backends.get(_backend_name(request), self.backend)
        return StructuredOutputManager._create_grammar(chosen, request)

    def clear_backend(self) -> None:
        backends = [one for one in self._backends.values() if one is not self.backend]
        self._backends.clear()
        super().clear_backend()
        for one in backends:
            one.destroy()


def _backend_name(request: Any) -> str | None:
    name: str | None = request.sampling_params.structured_outputs._backend
    return name


def install_backends() -> None:
    """Make engine cores of this process compile grammars with the backend of each request."""
    core.StructuredOutputManager = BackendsByRequest  # type: ignore[misc]
