"""Liveness probe of an instance: asks an engine that is quiet, ends one that is silent for long."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from banaserve.clock import Clock
from banaserve.engine.vllm.compat.config import is_on_cpu
from banaserve.engine.vllm.instance import Instance, State
from banaserve.engine.vllm.liveness.timeouts import ClusterTimeouts
from banaserve.platform.processes import StallWatch

logger = logging.getLogger(__name__)
_PROBE_INTERVAL_S = 0.5
_QUIET_S = 0.9
"""An engine that has said nothing for so long is asked: each question wakes it, which costs some
milliseconds of an idle machine, and routing reads no report older than two seconds."""
_PROBE_TIMEOUT_S = 5.0
_LONGEST_LOOK_S = 2 * _PROBE_TIMEOUT_S


class LivenessProbe:
    """Watches what an engine says, and ends it where that is nothing: to be started again.

    An engine that computes reports by itself; an idle one is asked. One whose client has failed
    computes for no client, and a stalled one computes nothing: both are ended.

    Args:
        before_each: Called before each look at the instance.
    """

    def __init__(
        self,
        instance: Instance,
        clock: Clock,
        timeouts: ClusterTimeouts,
        before_each: Callable[[], None],
    ) -> None:
        self._instance = instance
        self._clock = clock
        self._timeouts = timeouts
        self._stall_s = timeouts.stall_s
        self._before_each = before_each
        self._looked_s = clock.now()
        # Nobody asks an idle engine before, however long the others take to start.
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Hold nothing against the engine that was before this moment."""
        # Of an engine on another machine nobody here knows whether it works.
        counts_work = is_on_cpu() and self._instance.is_local
        limits = self._timeouts
        self._watch = StallWatch(limits.stall_s, limits.spin_s, counts_work=counts_work)
        self._since_s = self._clock.now()
        self._is_silent = False

    async def run(self) -> None:
        """Look at the instance twice a second, or more often where it may stall for less."""
        while True:
            await asyncio.sleep(min(_PROBE_INTERVAL_S, self._stall_s / 2))
            self._before_each()
            if self._stood_still():
                self._begin_anew()
            if self._instance.state is State.STARTING:
                self._check_start()
            elif self._instance.state is State.READY:
                await self._check()

    def _stood_still(self) -> bool:
        """Whether this process was stopped since its last look, perhaps with all of its engines.

        As by ``docker pause``. A busy one is late, too, so it takes more than a look can last.
        """
        since_s, self._looked_s = self._looked_s, self._clock.now()
        return self._looked_s - since_s > max(_LONGEST_LOOK_S, self._stall_s / 2)

    def _check_start(self) -> None:
        if self._watch.has_stalled_starting(self._instance.pid, self._clock.now()):
            self._end("it has stalled starting")

    async def _check(self) -> None:
        report, now_s = self._instance.view().report, self._clock.now()
        heard_s = max(report.at_s, self._since_s) if report is not None else now_s
        was_silent = self._is_silent
        self._is_silent = self._watch.has_stalled(self._instance.pid, heard_s, now_s)
        if self._instance.has_lost_client:
            self._end("its client has failed")
        # Asked once more: if it was this process that stood still, the engine answers now.
        elif was_silent and self._is_silent:
            self._end("it has stalled")
        elif report is None or now_s - report.at_s > min(_QUIET_S, self._stall_s / 2):
            await self._ask()

    def _end(self, why: str) -> None:
        logger.warning("instance %s is ended: %s", self._instance.id, why)
        self._instance.kill()

    async def _ask(self) -> None:
        try:
            await self._instance.probe(_PROBE_TIMEOUT_S)
        except Exception:
            logger.exception("asking instance %s", self._instance.id)
