"""Recovery from KV lost with a guest: the output of steps that read this KV must not count.

Also the scheduler whose pool of KV blocks can grow, shrink and start over while it serves.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from banaserve.base.errors import MigrationError
from banaserve.contracts.rpc.engine_api import PoolResize, PoolStatus
from banaserve.engine.compat import scheduler as compat
from banaserve.engine.compat.runner import hooks as runner_hooks
from banaserve.engine.compat.scheduler import AsyncScheduler, Scheduler
from banaserve.migration.kv import store_copier

if TYPE_CHECKING:
    from banaserve.engine.compat.scheduler import ModelRunnerOutput, SchedulerOutput


class StepRecovery:
    """Wrapper of the two halves of a runner's step, which marks lost steps.

    A step that was planned before the scheduler knew of the loss reads KV that is gone, so that
    step is lost as well.

    Args:
        runner: vLLM's model runner; methods are wrapped on this object, not on its class.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._life = 0
        self._valid_from = 0
        self.num_lost = 0
        runner_hooks.wrap_execute_model(runner, self._execute_model)
        runner_hooks.wrap_sample_tokens(runner, self._sample_tokens)

    def kv_lost(self) -> None:
        """Record the loss of the present life's KV; the step under way or the next reports it."""
        self._valid_from = self._life + 1
        store_copier.abandon_step()

    @property
    def _is_lost(self) -> bool:
        return self._life < self._valid_from

    def _execute_model(
        self, execute: runner_hooks.Call, scheduler_output: Any, *args: Any, **kwargs: Any
    ) -> Any:
        life = runner_hooks.kv_life_of(scheduler_output)
        self._life = self._life if life is None else life
        if self._is_lost:
            store_copier.abandon_step()
        return self._mark(execute(scheduler_output, *args, **kwargs))

    def _sample_tokens(self, sample: runner_hooks.Call, *args: Any, **kwargs: Any) -> Any:
        if not self._is_lost:
            return sample(*args, **kwargs)
        # A prompt that the dropped step completes is computed again, with its log probabilities.
        prompts = runner_hooks.prompt_logprobs_of(self._runner)
        incomplete = dict(prompts)
        output = sample(*args, **kwargs)
        prompts |= incomplete
        return self._mark(output)

    def _mark(self, output: Any) -> Any:
        if output is None or not self._is_lost:
            return output
        self.num_lost += 1
        life = self._life
        runner_hooks.wrap_output(output, lambda one: runner_hooks.set_lost_life(one, life))
        return output


logger = logging.getLogger(__name__)


class _PoolControl(Scheduler):
    """Scheduler with a pool that can be resized, also as a mix-in of its subclasses.

    All KV of an engine has one life, a number. When some KV is lost with a guest, the worker
    reports in which life; then every request starts over in the next life, and outputs in flight
    are dropped.
    """

    _kv_life = 0

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        output = super().schedule(*args, **kwargs)
        runner_hooks.set_kv_life(output, self._kv_life)
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:
        lost = runner_hooks.lost_life_of(model_runner_output)
        if lost is not None and lost >= self._kv_life:
            num_restarted = compat.restart_requests(self)
            self._kv_life = lost + 1
            logger.warning("KV was lost with a guest: %d requests start over", num_restarted)
        return super().update_from_output(scheduler_output, model_runner_output)

    # ---- called by the engine core's utilities, between two steps

    def pool_info(self) -> PoolStatus:
        num_blocks, free_blocks = compat.pool_usage(self)
        return PoolStatus(
            num_blocks=num_blocks,
            free_blocks=free_blocks,
            running=len(self.running),
            waiting=len(self.waiting),
            preemptions=sum(request.num_preemptions for request in self.requests.values()),
        )

    def resize_pool(self, num_blocks: int, hold: bool = False) -> PoolResize:
        """Grow or shrink the pool to ``num_blocks``; see ``CoreApi.banaserve_resize_pool``.

        Raises:
            MigrationError: The pool would have less than two blocks.
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
        return PoolResize(self.pool_info(), len(busy))


class PoolScheduler(_PoolControl):
    """vLLM's scheduler with a pool that can be resized."""


class AsyncPoolScheduler(_PoolControl, AsyncScheduler):
    """vLLM's asynchronous scheduler with a pool that can be resized."""
