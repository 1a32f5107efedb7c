"""Autoscaler: checks the load periodically, and lets the scaler add or remove an instance."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from banaserve.base.clock import Clock
from banaserve.base.errors import BanaServeError
from banaserve.base.tasks import end_tasks
from banaserve.base.types import ClusterView
from banaserve.orchestrator.control.autoscaling import (
    AutoscaleOptions,
    LoadsSince,
    ScaleStep,
    next_step,
)
from banaserve.serving.operations.scale_plan import InstanceCounts
from banaserve.serving.operations.scaler import Scaler

logger = logging.getLogger(__name__)
_DRAIN_S = 300.0
_PAUSE_S = 60.0
"""Pause after a step that was refused or has failed, in seconds: the obstacle may persist."""


@dataclass(eq=False)
class Autoscaler:
    """Autoscaler of a cluster; a step begins only when the previous one has ended.

    Attributes:
        may_act: Function that returns whether a step may begin; False while a person has paused the
            orchestrator.
        interval_s: Time between two checks of the load, in seconds.
        by_role: True if the instances of each role are scaled separately; False if roles follow the
            load.
    """

    scaler: Scaler
    view: Callable[[], ClusterView]
    may_act: Callable[[], bool]
    options: AutoscaleOptions
    clock: Clock
    interval_s: float
    by_role: bool
    _task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start checking the load, in a task."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Stop checking the load; a running scaling continues."""
        await end_tasks(self._task)

    async def _run(self) -> None:
        since = LoadsSince()
        while True:
            await self.clock.sleep(self.interval_s)
            try:
                since = await self._look(since)
            except Exception:
                logger.exception("autoscaling")
                since = LoadsSince()

    async def _look(self, since: LoadsSince) -> LoadsSince:
        view = self.view()
        step, since = next_step(view, self.options, since, self.by_role)
        if step is None or not self.may_act():
            return since
        try:
            scaling = self.scaler.begin(_wanted(step, view, self.by_role), _DRAIN_S, step.why)
            failure = (await self.scaler.wait(scaling.id)).reason
        except BanaServeError as refused:
            failure = str(refused)
        if failure:
            logger.warning("autoscaling (%s): %s", step.why, failure)
            await self.clock.sleep(_PAUSE_S)
        return LoadsSince()


def _wanted(step: ScaleStep, view: ClusterView, by_role: bool) -> InstanceCounts:
    if not by_role:
        return InstanceCounts(total=len(view.instances) + step.change)
    number = sum(one.role is step.role for one in view.instances.values()) + step.change
    return InstanceCounts(**{step.role.value: number})
