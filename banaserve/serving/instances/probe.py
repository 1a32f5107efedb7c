"""Liveness probe of an instance: asks a quiet engine, and ends one that has stalled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from banaserve.base.clock import Clock
from banaserve.base.platform.stall_watch import StallWatch
from banaserve.engine.compat.config import is_on_cpu
from banaserve.serving.instances.instance import Instance, State

logger = logging.getLogger(__name__)
_PROBE_INTERVAL_S = 0.5
_QUIET_S = 0.9
"""Silence after which an engine is asked, in seconds.

Each question wakes the engine, which costs an idle machine some milliseconds; routing reads no
report older than two seconds.
"""
_PROBE_TIMEOUT_S = 5.0
_LONGEST_LOOK_S = 2 * _PROBE_TIMEOUT_S


@dataclass(frozen=True)
class ClusterTimeouts:
    """Timeouts of the cluster, in seconds.

    Attributes:
        start_s: Maximum time for an engine to start.
        stall_s: Maximum silence of an engine that certainly does no work.
        spin_s: Maximum silence of any engine.
        retry_s: Time from giving up an instance to retrying it.
        unserved_s: Time in which no instance takes requests after which the server is unhealthy.
    """

    start_s: float = 600.0
    stall_s: float = 60.0
    spin_s: float = 600.0
    retry_s: float = 180.0
    unserved_s: float = 120.0


@dataclass(eq=False)
class LivenessProbe:
    """Watch over an engine's reports: an engine that is silent for long is ended, and so restarted.

    An engine that computes sends reports by itself; an idle engine is asked. An engine whose client
    has failed computes uselessly, and a stalled one computes nothing: both are ended.

    Attributes:
        before_each: Function called before each check of the instance.
    """

    instance: Instance
    clock: Clock
    timeouts: ClusterTimeouts
    before_each: Callable[[], None]

    def __post_init__(self) -> None:
        self._looked_s = self.clock.now()
        # No idle engine is asked before all engines have started, which may take long.
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Restart all measurements of silence at this moment."""
        # The processor use of an engine on another machine is unknown here.
        counts_work = is_on_cpu() and self.instance.place.is_local
        stall_s, spin_s = self.timeouts.stall_s, self.timeouts.spin_s
        self._watch = StallWatch(stall_s, spin_s, counts_work=counts_work)
        self._since_s = self.clock.now()
        self._is_silent = False

    async def run(self) -> None:
        """Check the instance twice a second, or more often if ``stall_s`` is below a second."""
        while True:
            await asyncio.sleep(min(_PROBE_INTERVAL_S, self.timeouts.stall_s / 2))
            try:
                await self._look()
            except Exception:
                logger.exception("looking at instance %s", self.instance.id)

    async def _look(self) -> None:
        self.before_each()
        if self._stood_still():
            self._begin_anew()
        if self.instance.state is State.STARTING:
            if self._watch.has_stalled_starting(self.instance.pid, self.clock.now()):
                self._end("it has stalled starting")
        elif self.instance.state is State.READY:
            await self._check()

    def _stood_still(self) -> bool:
        """Return whether this process was stopped since its last check, perhaps with its engines.

        ``docker pause`` does so. A busy process is late, too, so the time since the last check must
        exceed the longest duration of a check.
        """
        since_s, self._looked_s = self._looked_s, self.clock.now()
        return self._looked_s - since_s > max(_LONGEST_LOOK_S, self.timeouts.stall_s / 2)

    async def _check(self) -> None:
        report, now_s = self.instance.view().report, self.clock.now()
        heard_s = max(report.at_s, self._since_s) if report is not None else now_s
        was_silent = self._is_silent
        self._is_silent = self._watch.has_stalled(self.instance.pid, heard_s, now_s)
        if self.instance.has_lost_client:
            self._end("its client has failed")
        # Two checks in a row: if only this process stood still, the engine has answered meanwhile.
        elif was_silent and self._is_silent:
            self._end("it has stalled")
        elif report is None or now_s - report.at_s > min(_QUIET_S, self.timeouts.stall_s / 2):
            await self.instance.probe(_PROBE_TIMEOUT_S)

    def _end(self, why: str) -> None:
        logger.warning("instance %s is ended: %s", self.instance.id, why)
        self.instance.kill()
