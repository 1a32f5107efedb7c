"""Every private vLLM name behind schedulers and their queues. Tried with vLLM 0.32."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import RequestQueue, SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler

from banaserve.errors import UserError

if TYPE_CHECKING:
    from vllm.v1.request import Request

__all__ = [
    "AsyncScheduler",
    "RequestQueue",
    "Scheduler",
    "cached_tokens",
    "check_first_come",
    "use_waiting_queue",
]


def check_first_come(vllm_config: Any) -> None:
    """Return if the engine goes by no other order of requests.

    Raises:
        UserError: It goes by their priorities.
    """
    if vllm_config.scheduler_config.policy == SchedulingPolicy.PRIORITY.value:
        raise UserError(
            "--scheduling-policy priority and the preble scheduler exclude each other: "
            "leave one of them out"
        )


def use_waiting_queue(scheduler: Scheduler, queue: RequestQueue) -> None:
    """Let a scheduler that has no request yet take its waiting requests from ``queue``.

    Requests that wait and hold KV blocks have a queue of their own, which goes first.
    """
    assert not scheduler.waiting
    scheduler.waiting = queue


def cached_tokens(scheduler: Scheduler, request: Request) -> int:
    """How many leading tokens of ``request`` the engine's prefix cache has; changes nothing."""
    manager = scheduler.kv_cache_manager
    if not manager.prefix_cache_lookup_enabled(request):
        return 0
    # ``get_computed_blocks`` would tell listeners of events each time it is asked.
    found = manager.coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)
    return int(found[1])
