"""Every private vLLM name that budgets of steps rely on, in one file; see ``compat``."""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig
from vllm.v1.engine.core import EngineCore

UTILITY = "banaserve_set_budget"


def install() -> None:
    """Let engine cores of this process take another budget between two steps."""
    setattr(EngineCore, UTILITY, _set_budget)


def own_budget(config: VllmConfig) -> tuple[int, int]:
    """Tokens of a step and requests that run at once, as vLLM's options say.

    What a runner has buffers for: no more can be had at run time.
    """
    scheduler = config.scheduler_config
    tokens = scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens
    return tokens, scheduler.max_num_active_seqs or scheduler.max_num_seqs


def _set_budget(core: Any, num_tokens: int, num_requests: int) -> dict[str, int]:
    # Requests that run already go on: the limit is asked for where one is admitted.
    scheduler = core.scheduler
    most_tokens, most_requests = own_budget(scheduler.vllm_config)
    scheduler.max_num_scheduled_tokens = min(num_tokens, most_tokens)
    scheduler.max_num_active_reqs = min(num_requests, most_requests)
    return {
        "num_tokens": scheduler.max_num_scheduled_tokens,
        "num_requests": scheduler.max_num_active_reqs,
    }
