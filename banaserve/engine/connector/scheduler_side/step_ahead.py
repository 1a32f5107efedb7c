"""The step that the scheduler will plan next, as far as its connector knows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from banaserve.engine.connector.scheduler_side.request_state import RequestState
from banaserve.kvstore.client.cost_gate import FetchWork, StepBeside


class StepAhead:
    """Work and fetches that the next step already has; a request that looks up a prefix joins it.

    Requests of the previous step continue in the next one, beside those admitted so far. It is an
    estimate: vLLM may preempt one of them, which only the plan shows.

    Attributes:
        max_tokens: Maximum number of tokens of a step; may change while the engine serves.
    """

    def __init__(self, tracked: Mapping[str, RequestState], max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._tracked = tracked
        self._last: Sequence[tuple[str, int, int]] = ()
        self._work: FetchWork | None = None
        self._fetched_blocks = 0

    def planned(self, batch: Sequence[tuple[str, int, int]]) -> None:
        """Start over for the step after one that was just planned.

        Args:
            batch: Id and tokens computed before and in the planned step, for each request.
        """
        self._last, self._work, self._fetched_blocks = batch, None, 0

    def admit(self, num_before: int, num_tokens: int, fetched_blocks: int) -> None:
        """Add a request, ``num_before`` of whose ``num_tokens`` tokens need no computation."""
        work = self._work_so_far()
        num_new = max(1, min(num_tokens - num_before, self.max_tokens - work.tokens))
        self._work = work + FetchWork.of(num_new, num_before)
        self._fetched_blocks += fetched_blocks

    def beside(self) -> StepBeside:
        """Return the work and the fetches of the step so far."""
        return StepBeside(self._work_so_far(), self._fetched_blocks, self.max_tokens)

    def _work_so_far(self) -> FetchWork:
        # Computed on demand only: most steps admit no request.
        if self._work is None:
            self._work = FetchWork()
            for request_id, before, num_scheduled in self._last:
                if (tracked := self._tracked.get(request_id)) is not None:
                    computed = before + num_scheduled
                    left = tracked.request.num_tokens - computed
                    room = self.max_tokens - self._work.tokens
                    self._work += FetchWork.of(max(1, min(left, room)), computed)
        return self._work
