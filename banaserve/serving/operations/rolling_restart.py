"""Rolling restarts: all engines are replaced one at a time, and no request is lost.

An engine in its turn receives no new requests. Its streams move at once to other engines with the
same weights, or end there if no other engine has these weights. Then the engine is ended, and a new
one must prove that it serves. If one does not, all replaced engines go back to their old settings.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from functools import partial

from banaserve.base.clock import Clock
from banaserve.base.errors import InstanceDeadError, MigrationError, UserError
from banaserve.base.platform.processes import in_daemon_thread
from banaserve.base.types import InstanceId
from banaserve.contracts.restart_api import EngineRestart, RestartRequest, RollingRestart
from banaserve.serving.instances.cluster import Cluster
from banaserve.serving.instances.generations import can_leave, restart_order
from banaserve.serving.instances.instance import Check, Instance, State
from banaserve.serving.launch.engine_settings import EngineSettings
from banaserve.serving.monitoring import metrics
from banaserve.serving.moves.coordinator import Coordinator
from banaserve.serving.operation_base import OperationAbortedError, Operations

logger = logging.getLogger(__name__)
_POLL_S = 0.02
_ABORT_S = 5.0

Make = Callable[[EngineSettings, str, Sequence[str]], EngineSettings]
"""Function that makes settings from the present ones, a model (empty: the same) and more options
of vLLM. Blocks. Raises UserError if no engine could serve with the new settings."""


class RollingRestarts(Operations[RollingRestart]):
    """Rolling restarts of all engines, one restart at a time.

    Args:
        check: Function that raises InstanceDeadError if a new engine must not serve.
        forget: Function called with the served weights at the end of a restart, so that others can
            be forgotten.
        is_scaling: Function that returns whether instances are being added or removed; then no
            engine is replaced.

    Attributes:
        settings: Settings of all engines since the last successful restart.
    """

    def __init__(
        self,
        cluster: Cluster,
        coordinator: Coordinator,
        settings: EngineSettings,
        make: Make,
        check: Check,
        forget: Callable[[str], None],
        request_timeout_s: float,
        clock: Clock,
        is_scaling: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__("restart", "e", clock, num_kept=50)
        self.settings = settings
        self._cluster = cluster
        self._coordinator = coordinator
        self._make = make
        self._check = check
        self._forget = forget
        self._request_timeout_s = request_timeout_s
        self._is_scaling = is_scaling
        self._is_beginning = asyncio.Lock()
        self._drain_s = request_timeout_s

    async def begin(self, ask: RestartRequest) -> RollingRestart:
        """Check a restart and begin it.

        Raises:
            UserError: No engine could serve with the new settings; none has been replaced.
            MigrationError: The restart cannot begin at present.
        """
        timeout_s = ask.timeout_s or self._request_timeout_s
        if not (timeout_s > 0 and math.isfinite(timeout_s)):
            raise UserError(
                f"timeout_s={ask.timeout_s:g}: give seconds, or 0 for those of requests"
            )
        async with self._is_beginning:
            if self.is_under_way:
                raise MigrationError("a rolling restart is under way already: see banaserve status")
            self._check_free()
            # A model may be fetched for an hour: the server's end must not wait for it.
            settings = await in_daemon_thread(
                partial(self._make, self.settings, ask.model, ask.vllm_options)
            )
            self._check_free()  # a scaling or a pause may have begun meanwhile
            instances = self._cluster.instances.values()
            restart = RollingRestart(
                self._new_id(),
                "running",
                [EngineRestart(name) for name in restart_order(instances)],
                ask.model,
                ask.vllm_options,
                is_changed=settings is not self.settings,
            )
            self._drain_s = timeout_s
            self._carry_out(restart, self._replace_all(restart, settings))
        return restart

    def _check_free(self) -> None:
        """Raise MigrationError if instances are being added or removed, or engines are paused.

        A paused engine ends no request.
        """
        if self._is_scaling():
            raise MigrationError("a scaling is under way: wait for its end, or abort it")
        for instance in self._cluster.instances.values():
            instance.check_not_paused()

    async def _replace_all(self, restart: RollingRestart, settings: EngineSettings) -> None:
        before = self.settings
        done: list[EngineRestart] = []
        try:
            for line in restart.engines:
                if line.instance not in self._cluster.instances:
                    continue
                await self._turn(restart, line, settings)
                done.append(line)
                self._check_wanted(restart)
            self.settings = settings
        except Exception as failure:
            ending, restart.reason = self._ending_of(restart, failure)
            logger.warning("rolling restart %s: %s", restart.id, restart.reason)
            if restart.is_changed and done:
                restart.state = "going back"
                self._forget_abort(restart)
                await self._go_back(restart, done, before)
            raise OperationAbortedError(restart.reason, ending) from failure
        finally:
            self._forget(self.settings.weights)

    def _ending_of(self, state: RollingRestart, error: Exception) -> tuple[str, str]:
        ending, reason = super()._ending_of(state, error)
        return ending, reason or "given up by an operator"

    def _end(self, state: RollingRestart, ending: str, reason: str) -> None:
        super()._end(state, ending, reason)
        metrics.ROLLING_RESTARTS.labels(ending).inc()

    async def _go_back(
        self, restart: RollingRestart, done: Sequence[EngineRestart], before: EngineSettings
    ) -> None:
        """Restore the old settings in reverse order.

        An instance that does not start with the old settings is started again with those it had.
        """
        for line in reversed(done):
            try:
                await self._turn(restart, line, before)
                line.state = "taken back"
            except InstanceDeadError as failure:
                restart.reason += f"; {line.instance} does not go back: {failure}"

    async def _turn(
        self, restart: RollingRestart, line: EngineRestart, settings: EngineSettings
    ) -> None:
        instance = self._cluster.instance(InstanceId(line.instance))
        began_s = self._clock.now()
        try:
            with instance.service.replacing():
                line.state = "draining"
                await self._drain(restart, line, instance, settings)
                line.state = "starting"
                await self._replace(instance, settings)
                line.state = "done"
        except BaseException:
            line.state = "failed" if line.state == "starting" else "waiting"
            raise
        finally:
            line.num_left, line.seconds = 0, self._clock.now() - began_s

    async def _replace(self, instance: Instance, settings: EngineSettings) -> None:
        is_same = instance.is_of(settings)
        try:
            await self._cluster.supervisor.replace(instance, settings, self._check)
        except InstanceDeadError:
            await self._cluster.supervisor.settled(instance)
            if not is_same or instance.state is State.FAILED:
                raise

    async def _drain(
        self,
        restart: RollingRestart,
        line: EngineRestart,
        instance: Instance,
        settings: EngineSettings,
    ) -> None:
        """Return when no request would be lost, or the time for it has passed.

        An abort ends a restart, but not one that goes back: its engines would keep settings of two
        kinds. It ends the wait instead.
        """
        for migration in self._coordinator.recent():
            if migration.is_open and migration.host == instance.id:
                self._coordinator.abort(migration.id, f"instance {instance.id} is restarted")
                await self._coordinator.wait(migration.id, _ABORT_S)
        until_s = self._clock.now() + self._drain_s
        while True:
            if restart.state == "going back" and self._is_aborting(restart):
                return
            self._check_wanted(restart)
            if can_leave(instance, self._cluster.instances.values()):
                instance.move_streams()
            left = line.num_left = instance.inflight_requests
            if settings.weights == instance.weights:
                # The remaining movable streams continue in the new engine.
                left -= instance.num_movable
            if left <= 0 or self._clock.now() >= until_s:
                return
            await asyncio.sleep(_POLL_S)
