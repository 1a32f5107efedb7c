"""vLLM's engine inside this process, for measurements; it is slow to import."""

from __future__ import annotations

from typing import Any

from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import EngineArgs

__all__ = ["LLM", "EngineArgs", "SamplingParams"]


def scheduler_connector(engine: Any) -> Any:
    """Return the connector of an ``LLM``'s engine in the scheduler's role."""
    return engine.engine_core.engine_core.scheduler.connector
