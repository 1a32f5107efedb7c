"""vLLM's scheduler with Preble's order of waiting requests; for ``--scheduler-cls``.

    banaserve serve --scheduler preble
    vllm serve MODEL --scheduler-cls banaserve.engine.vllm.preble_scheduler.PrebleScheduler

Only the order in which waiting requests are taken differs from ``Scheduler``; what becomes of each
is vLLM's. What counts as cached is the engine's own prefix cache: the store is asked when a
request's turn has come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from banaserve.engine.vllm.compat.scheduler import (
    AsyncScheduler,
    Request,
    RequestQueue,
    Scheduler,
    cached_tokens,
    check_first_come,
    use_waiting_queue,
)
from banaserve.orchestrator.replicas.preble.priority_groups import NUM_GROUPS, PriorityGroups

LOOKS_A_STEP = 16
"""Waiting requests whose cached part is measured again before a step: tens of microseconds each."""


class PriorityGroupQueue(RequestQueue):
    """vLLM's queue of waiting requests, in Preble's order.

    A request that vLLM takes out and puts back within one step keeps its place and its turn; one
    that is preempted has had its turn and goes first.
    """

    def __init__(self, cached_fraction: Callable[[Request], float], num_groups: int) -> None:
        self._cached_fraction = cached_fraction
        self._groups: PriorityGroups[Request] = PriorityGroups(num_groups)

    def look_again(self) -> None:
        """Raise requests of whose prompt more is cached than when they came."""
        for request in self._groups.to_look_at(LOOKS_A_STEP):
            self._groups.raise_to(request, self._cached_fraction(request))

    def settle(self) -> None:
        """Say that a step is planned."""
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
        # vLLM names requests of all its queues.
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
    """vLLM's scheduler, or its asynchronous one where the engine is set to that.

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
    """The same order while the next step is planned before the last has ended."""


def _age(request: Request) -> tuple[float, str]:
    return request.arrival_time, request.request_id
