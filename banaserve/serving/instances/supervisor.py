"""Supervisor of the instances: restarts instances that have ended, and replaces their engines."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from banaserve.base.clock import Clock
from banaserve.base.errors import InstanceDeadError
from banaserve.base.tasks import end_tasks
from banaserve.base.types import InstanceId
from banaserve.serving.instances.instance import Check, Instance, State
from banaserve.serving.instances.probe import ClusterTimeouts, LivenessProbe
from banaserve.serving.launch.engine_settings import EngineSettings
from banaserve.serving.monitoring import metrics

logger = logging.getLogger(__name__)
_FIRST_DELAY_S = 0.5
_RESTARTS_WITHIN_S = 300.0
_HEALTHY_S = 10.0
"""Serving time after which earlier restarts are forgotten, in seconds."""
_POLL_S = 0.02
_PAUSE_POLL_S = 0.1
_LEAVE_S = 2.0
"""Maximum wait for moved streams to leave an engine before it is ended, in seconds.

A stream leaves with its next token, which a slow client may delay; it need not have left when its
engine ends.
"""


@dataclass(frozen=True, slots=True)
class Replacement:
    """An engine that is to be started in place of another one.

    Attributes:
        before: Settings of the old engine.
        check: Function that raises if the new engine must not serve.
        done: Future that is done when the new engine serves, or has failed.
    """

    before: EngineSettings
    check: Check
    done: asyncio.Future[None]


class RestartPolicy:
    """Limit and delays of the restarts of an instance that dies.

    Each delay is twice as long as the one before. An instance that has served for a while did not
    fail at its start, whatever ended it, so its earlier restarts are forgotten.

    Args:
        limit: Number of restarts within five minutes after which the instance is given up.
    """

    def __init__(self, limit: int = 5) -> None:
        self._limit = limit
        self._at_s: list[float] = []

    def has_served(self, served_s: float) -> None:
        """Record that the instance has ended after serving for ``served_s`` seconds."""
        if served_s >= _HEALTHY_S:
            self._at_s.clear()

    def next_delay_s(self, now_s: float) -> float | None:
        """Count a restart and return its delay, in seconds; None to give the instance up."""
        self._at_s = [at for at in self._at_s if now_s - at < _RESTARTS_WITHIN_S]
        if len(self._at_s) >= self._limit:
            return None
        self._at_s.append(now_s)
        return _FIRST_DELAY_S * 2.0 ** (len(self._at_s) - 1)


class Supervisor:
    """Supervisor of instances: keeps watched instances alive, and replaces engines on request.

    Args:
        instances: Instances of the cluster by id; an instance no longer in it has been removed.
        before_each_probe: Function called before each check of an instance.

    Attributes:
        on_ended: Functions called with the id of each instance whose engine has ended.
        failed: Event set when every instance has been given up, and none serves.
        last_failure: Error of the last failed restart, in one line; empty if none has failed.
    """

    def __init__(
        self,
        instances: Mapping[InstanceId, Instance],
        clock: Clock,
        timeouts: ClusterTimeouts,
        before_each_probe: Callable[[], None],
    ) -> None:
        self.on_ended: list[Callable[[InstanceId], None]] = []
        self.failed = asyncio.Event()
        self.last_failure = ""
        self._instances = instances
        self._clock = clock
        self._timeouts = timeouts
        self._before_each_probe = before_each_probe
        self._watches: dict[InstanceId, list[asyncio.Task[None]]] = {}
        self._replacements: dict[InstanceId, Replacement] = {}
        self._without_machine: set[InstanceId] = set()

    @property
    def has_failed(self) -> bool:
        """True if every instance has been given up, and none waits for its machine.

        An instance whose machine has just returned is not given up: its start is imminent.
        """
        every = self._instances.values()
        return all(
            i.state is State.FAILED and i.place.is_there and i.id not in self._without_machine
            for i in every
        )

    def watch(self, instance: Instance) -> None:
        """Keep an instance alive after its start."""
        probe = LivenessProbe(instance, self._clock, self._timeouts, self._before_each_probe)
        kept = (self._keep_alive(instance), probe.run())
        self._watches[instance.id] = [asyncio.create_task(one) for one in kept]

    async def end_removed(self, instance: Instance) -> None:
        """End an instance that has been removed; return when it has ended."""
        keep_alive, probing = self._watches.pop(instance.id)
        probing.cancel()
        instance.mark_dead()
        instance.kill()
        await asyncio.gather(keep_alive, probing, return_exceptions=True)

    async def stop(self) -> None:
        """Stop watching all instances."""
        tasks = [task for watch in self._watches.values() for task in watch]
        await end_tasks(*tasks)

    def _is_removed(self, instance: Instance) -> bool:
        return instance.id not in self._instances

    async def _keep_alive(self, instance: Instance) -> None:
        restarts = RestartPolicy()
        while True:
            began_s = self._clock.now()
            await instance.wait_dying()
            with instance.giving_back():
                instance.mark_dead()  # its streams continue elsewhere meanwhile
                await instance.wait_ended()
            if self._is_removed(instance):
                self._tell_of_end(instance)
                return
            replacement = self._replacements.pop(instance.id, None)
            if replacement is None:
                logger.warning("instance %s ended: %s", instance.id, instance.last_words())
            restarts.has_served(self._clock.now() - began_s)
            self._tell_of_end(instance)
            if replacement is not None:
                restarts = RestartPolicy()
                if await self._start_other(instance, replacement):
                    continue
            if not await self._until_restarted(instance, restarts):
                return

    def _tell_of_end(self, instance: Instance) -> None:
        for told in self.on_ended:
            try:
                told(instance.id)
            except Exception:
                logger.exception("what follows the end of instance %s", instance.id)

    # ---- starting again

    async def _until_restarted(self, instance: Instance, restarts: RestartPolicy) -> bool:
        """Restart an instance; retry every few minutes if given up; return False if removed.

        An instance whose machine is away is started when the machine is back: its absence is not
        the instance's fault.
        """
        while not await self._restart(instance, restarts):
            if self._is_removed(instance):
                return False
            instance.mark_dead(State.FAILED)
            was_there = instance.place.is_there
            if was_there:
                self._without_machine.discard(instance.id)
            else:
                self._without_machine.add(instance.id)
            if self.has_failed:
                self.failed.set()
            await self._pause(instance)
            replacement = self._replacements.pop(instance.id, None)
            if replacement is not None and await self._start_other(instance, replacement):
                return True
            restarts = RestartPolicy(limit=1) if was_there else RestartPolicy()
        return True

    async def _pause(self, instance: Instance) -> None:
        """Wait for ``retry_s``, for the return of the machine, or for another engine's turn."""
        until_s, was_there = self._clock.now() + self._timeouts.retry_s, instance.place.is_there
        while self._clock.now() < until_s and instance.id not in self._replacements:
            if self._is_removed(instance) or instance.place.is_there is not was_there:
                return
            await self._clock.sleep(_PAUSE_POLL_S)

    async def _restart(self, instance: Instance, restarts: RestartPolicy) -> bool:
        while (
            instance.place.is_there
            and (delay_s := restarts.next_delay_s(self._clock.now())) is not None
        ):
            await asyncio.sleep(delay_s)
            if self._is_removed(instance) or instance.id in self._replacements:
                return False
            metrics.RESTARTS.labels(instance.id).inc()
            try:
                await instance.start(self._timeouts.start_s)
            except InstanceDeadError as failure:
                self.last_failure = str(failure)
                logger.warning("%s", failure)
            except Exception as failure:
                self.last_failure = f"{type(failure).__name__}: {failure}"
                logger.exception("starting instance %s again", instance.id)
            else:
                if not self._is_removed(instance):
                    logger.info("instance %s serves again", instance.id)
                    return True
            instance.mark_dead()
            instance.kill()
            if self._is_removed(instance):
                return False
        if instance.place.is_there:
            logger.error("instance %s ends too often: given up", instance.id)
        else:
            logger.warning("instance %s waits for its machine", instance.id)
        return False

    # ---- replacing engines

    async def replace(self, instance: Instance, settings: EngineSettings, check: Check) -> None:
        """End an instance's engine and start one with ``settings`` in its place.

        No request is blamed for this end, and it does not count as one of the restarts that a dead
        instance may have.

        Args:
            check: Function that raises ``InstanceDeadError`` if the new engine, once started, must
                not serve.

        Raises:
            InstanceDeadError: The new engine does not start or must not serve; an engine with the
                old settings is being started.
        """
        await self.settled(instance)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        replacement = Replacement(instance.settings, check, done)
        self._replacements[instance.id] = replacement
        instance.retire(settings)
        until_s = self._clock.now() + _LEAVE_S
        while instance.inflight_requests and self._clock.now() < until_s:
            await self._clock.sleep(_POLL_S)
        if self._replacements.get(instance.id) is replacement:
            instance.kill()
        await done

    async def settled(self, instance: Instance) -> None:
        """Return when an instance serves or has been given up."""
        while instance.state not in (State.READY, State.FAILED):
            await self._clock.sleep(_POLL_S)

    async def _start_other(self, instance: Instance, replacement: Replacement) -> bool:
        try:
            await instance.start(self._timeouts.start_s, replacement.check)
        except Exception as failure:
            if not isinstance(failure, InstanceDeadError):
                logger.exception("starting instance %s with other settings", instance.id)
            instance.kill()
            await instance.wait_ended()
            instance.mark_dead()
            instance.settings = replacement.before
            if not replacement.done.done():
                replacement.done.set_exception(InstanceDeadError(str(failure)))
            return False
        logger.info("instance %s has been replaced", instance.id)
        if not replacement.done.done():
            replacement.done.set_result(None)
        return True
