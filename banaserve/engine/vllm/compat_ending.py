"""Every private vLLM name that the end of an engine relies on, in one file; see ``compat``."""

from __future__ import annotations

from typing import Any

from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState


def install() -> None:
    """Let SIGTERM end engine cores of this process as a death does, after the step under way.

    vLLM would end all their answers as aborted ones first, which no client can tell from complete
    ones. Of a death the front door hears at once, and streams go on elsewhere.
    """
    EngineCoreProc._handle_shutdown = _goes_on
    EngineCoreProc._reject_add_in_shutdown = _take


def _goes_on(core: Any) -> bool:
    if core.shutdown_state is EngineShutdownState.RUNNING:
        return True
    core._send_engine_dead()
    return False


def _take(core: Any, request: EngineCoreRequest) -> bool:
    """A refusal is an aborted answer too: what still comes dies with the rest."""
    return False
