"""A scheduler whose pool of KV blocks grows and shrinks while it serves, and can start over."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from banaserve.engine.vllm import compat_migration as compat
from banaserve.engine.vllm.migration.lost_steps import LIFE, LOST_LIFE
from banaserve.errors import MigrationError

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput

logger = logging.getLogger(__name__)


class _PoolControl:
    """Mixed into vLLM's schedulers.

    All KV of an engine has one life. When some of it is lost with a guest, the worker says in
    which life; then every request starts over in the next, and what is in flight is dropped.
    """

    _kv_life = 0

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        output: SchedulerOutput = super().schedule(*args, **kwargs)  # type: ignore[misc]
        setattr(output, LIFE, self._kv_life)
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:
        lost = getattr(model_runner_output, LOST_LIFE, None)
        if lost is not None and lost >= self._kv_life:
            num_restarted = compat.restart_requests(self)
            self._kv_life = lost + 1
            logger.warning("KV was lost with a guest: %d requests start over", num_restarted)
        return super().update_from_output(  # type: ignore[misc]
            scheduler_output, model_runner_output
        )

    # ---- called by the engine core's utility, between two steps

    def pool_info(self) -> dict[str, int]:
        """``num_blocks``, ``free_blocks``, ``running``, ``waiting``, ``preemptions``: counts."""
        num_blocks, free_blocks = compat.pool_usage(self)
        return {
            "num_blocks": num_blocks,
            "free_blocks": free_blocks,
            "running": len(self.running),  # type: ignore[attr-defined]
            "waiting": len(self.waiting),  # type: ignore[attr-defined]
            "preemptions": sum(
                request.num_preemptions
                for request in self.requests.values()  # type: ignore[attr-defined]
            ),
        }

    def resize_pool(self, num_blocks: int, hold: bool = False) -> dict[str, Any]:
        """Grow or shrink the pool to ``num_blocks``; a block in use is never taken away.

        Args:
            hold: Where blocks in use are in the way, give none of those that are to go to anybody
                until the next call: under load they would never be free all at once.

        Returns:
            ``pool_info``, with ``busy``: how many blocks in use stand in the way of shrinking.
            Where there are any, nothing has changed: ask again later.

        Raises:
            MigrationError: Less than two blocks.
        """
        if num_blocks < 2:
            raise MigrationError("a pool has at least two blocks")
        compat.release_blocks(self)
        busy: list[int] = []
        if num_blocks >= compat.pool_usage(self)[0]:
            compat.grow_pool(self, num_blocks)
        else:
            busy = compat.shrink_pool(self, num_blocks)
            if busy and hold:
                compat.hold_blocks(self, num_blocks)
        return {**self.pool_info(), "busy": len(busy)}


class PoolScheduler(_PoolControl, Scheduler):
    """vLLM's scheduler with a pool that can change."""


class AsyncPoolScheduler(_PoolControl, AsyncScheduler):
    """vLLM's asynchronous scheduler with a pool that can change."""
