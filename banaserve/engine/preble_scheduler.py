"""vLLM's scheduler with Preble's order of waiting requests; for ``--scheduler-cls``.

    banaserve serve --scheduler preble
    vllm serve MODEL --scheduler-cls banaserve.engine.preble_scheduler.PrebleScheduler

Only the order in which waiting requests are taken differs from ``Scheduler``; all else is vLLM's.
Only the engine's own prefix cache counts as cached: the store is asked when a request's turn has
come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from banaserve.engine.compat.scheduler import (
    AsyncScheduler,
    Request,
    RequestQueue,
    Scheduler,
    cached_tokens,
    check_first_come,
    use_waiting_queue,
)
from banaserve.engine.priority_groups import NUM_GROUPS, PriorityGroups

LOOKS_A_STEP = 16
"""Number of waiting requests whose cached fraction is measured again before each step.

Each measurement takes tens of microseconds.
"""


class PriorityGroupQueue(RequestQueue):
    """vLLM's queue of waiting requests, in Preble's order.

    A request that vLLM takes out and puts back within one step keeps its place and its turn. A
    preempted request has had its turn, and goes before all others.
    """

    def __init__(self, cached_fraction: Callable[[Request], float], num_groups: int) -> None:
        self._cached_fraction = cached_fraction
        self._groups: PriorityGroups[Request] = PriorityGroups(num_groups)

    def look_again(self) -> None:
        """Move requests up whose prompts are now cached to a larger part than at arrival."""
        for request in self._groups.to_look_at(LOOKS_A_STEP):
            self._groups.raise_to(request, self._cached_fraction(request))

    def settle(self) -> None:
        """Note that a step has been planned: requests taken since the last step stay taken."""
        self._groups.settle()

    def add_request(self, request: Request) -> None:
        self._groups.add(request, _age(request), self._cached_fraction(request))

    def pop_request(self) -> Request:
        return self._groups.pop()

    def peek_request(self) -> Request:
        return self._groups.peek()

    def prepend_request(self, request: Request) -> None:
        if self._groups.was_taken(request):
            self._groups.put_back(request)
        else:
            self._groups.add_first(request, _age(request))

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.prepend_request(request)

    def remove_request(self, request: Request) -> None:
        self._groups.remove(request)

    def remove_requests(self, requests: Iterable[Request]) -> None:
        # vLLM passes requests of all its queues.
        for request in requests:
            if request in self._groups:
                self._groups.remove(request)

    def __bool__(self) -> bool:
        return len(self._groups) > 0

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._groups)


class PrebleScheduler(Scheduler):
    """vLLM's scheduler with Preble's order; asynchronous if the engine is configured so.

    Raises:
        UserError: The engine is configured to order requests by priority.
    """

    def __new__(cls, vllm_config: Any, *_: Any, **__: Any) -> PrebleScheduler:
        is_async = vllm_config.scheduler_config.async_scheduling
        made: PrebleScheduler = object.__new__(PrebleAsyncScheduler if is_async else cls)
        return made

    def __init__(self, vllm_config: Any, *arguments: Any, **options: Any) -> None:
        check_first_come(vllm_config)
        super().__init__(vllm_config, *arguments, **options)
        self._preble = PriorityGroupQueue(self._cached_fraction, NUM_GROUPS)
        use_waiting_queue(self, self._preble)

    def schedule(self, *arguments: Any, **options: Any) -> Any:
        """Plan one step, as vLLM does."""
        self._preble.look_again()
        try:
            return super().schedule(*arguments, **options)
        finally:
            self._preble.settle()

    def _cached_fraction(self, request: Request) -> float:
        return cached_tokens(self, request) / max(1, request.num_tokens)


class PrebleAsyncScheduler(PrebleScheduler, AsyncScheduler):
    """Preble's order for vLLM's asynchronous scheduler, which plans a step before the last ends."""


def _age(request: Request) -> tuple[float, str]:
    return request.arrival_time, request.request_id
