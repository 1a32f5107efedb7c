"""The step that the scheduler is about to plan, as far as its connector knows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from banaserve.engine.vllm.kv_connector.request_state import RequestState
from banaserve.kvstore.prefix_cut import FetchWork, StepBeside


class StepAhead:
    """Work and fetches that the next step has already: who asks for a prefix joins it.

    Requests of the step before go on in it; those that are admitted meanwhile come first. It is an
    estimate: vLLM may preempt one of them, and says so only with the plan.

    Args:
        tracked: Requests that have not ended, by id.
        max_tokens: Most tokens of a step.

    Attributes:
        max_tokens: May change while the engine serves.
    """

    def __init__(self, tracked: Mapping[str, RequestState], max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._tracked = tracked
        self._last: Sequence[tuple[str, int, int]] = ()
        self._work: FetchWork | None = None
        self._fetched_blocks = 0

    def planned(self, batch: Sequence[tuple[str, int, int]]) -> None:
        """A step was planned, so the next one lies ahead.

        Args:
            batch: Of each request its id and the tokens computed before the step and in it.
        """
        self._last, self._work, self._fetched_blocks = batch, None, 0

    def admit(self, num_before: int, num_tokens: int, fetched_blocks: int) -> None:
        """A request has joined: it has ``num_before`` of its ``num_tokens`` tokens."""
        work = self._work_so_far()
        num_new = max(1, min(num_tokens - num_before, self.max_tokens - work.tokens))
        self._work = work + FetchWork.of(num_new, num_before)
        self._fetched_blocks += fetched_blocks

    def beside(self) -> StepBeside:
        """What there is so far."""
        return StepBeside(self._work_so_far(), self._fetched_blocks, self.max_tokens)

    def _work_so_far(self) -> FetchWork:
        # Only where somebody asks: most steps admit nobody.
        if self._work is None:
            self._work = FetchWork()
            for request_id, before, num_scheduled in self._last:
                if (tracked := self._tracked.get(request_id)) is not None:
                    computed = before + num_scheduled
                    left = tracked.request.num_tokens - computed
                    room = self.max_tokens - self._work.tokens
                    self._work += FetchWork.of(max(1, min(left, room)), computed)
        return self._work
