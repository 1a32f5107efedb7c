"""Role switches and drains of instances, without a restart."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from math import inf

from banaserve.base.clock import Clock
from banaserve.base.errors import MigrationError, NoAnswerError, UserError
from banaserve.base.text.names import check_known
from banaserve.base.types import InstanceId, Role
from banaserve.contracts.instances import DrainState, RoleChange
from banaserve.serving.instances.instance import Instance
from banaserve.serving.operation_base import OperationAbortedError, Operations

logger = logging.getLogger(__name__)
_POLL_S = 0.02
_WORDS = (Role.PREFILL.value, Role.DECODE.value, "both", Role.COLOCATED.value)


class Roles(Operations[RoleChange]):
    """Role switches of instances: each drains its instance, and then changes the role.

    The engine knows no role, so a leg that arrives late is served all the same; an instance is
    drained only so that work of one role does not slow down that of the other. A switch to
    ``colocated`` drains nothing. An instance with a ``drain_s`` of 0 serves on until its role has
    changed.
    """

    def __init__(self, instances: Mapping[InstanceId, Instance], clock: Clock) -> None:
        super().__init__("role switch", "r", clock)
        self._instances = instances

    def begin(
        self,
        name: str,
        role_name: str,
        timeout_s: float,
        drain_s: float = inf,
        step_tokens: int = 0,
    ) -> RoleChange:
        """Begin to drain an instance; it gets the new role when it has no requests left.

        Args:
            role_name: New role. If only ``step_tokens`` changes, it may be the present role; then
                nothing is drained.
            timeout_s: Time after which an instance that is not drained keeps its role, in seconds.
            drain_s: Time after which the instance gets the new role even with requests left, which
                continue there, in seconds.
            step_tokens: Maximum number of tokens of a step with the new role; 0 for the default of
                the role.

        Raises:
            UserError: There is no such instance or role, or a number is out of its range.
            MigrationError: The instance cannot get the role at present.
        """
        check_known("instance", name, self._instances)
        check_known("role", role_name, _WORDS)
        if not timeout_s > 0:
            raise UserError(f"timeout_s={timeout_s:g}: give more than 0 seconds")
        if step_tokens < 0:
            raise UserError(f"max_num_batched_tokens={step_tokens}: give 0 or more")
        instance, role = self._instances[InstanceId(name)], Role.of(role_name)
        self._check(instance, role, step_tokens)
        change = RoleChange(self._new_id(), name, instance.role.value, role.value, "draining")
        if role in (Role.COLOCATED, instance.role):
            drain_s = 0.0
        instance.service.begin_switch(role, drains=drain_s > 0)
        work = self._switch(change, instance, role, timeout_s, drain_s, step_tokens)
        self._carry_out(change, work)
        return change

    def _abort(self, state: RoleChange) -> None:
        """Show the end at once: the instance keeps its role."""
        state.state = "aborted"

    def _ending_of(self, state: RoleChange, error: Exception) -> tuple[str, str]:
        ending, reason = super()._ending_of(state, error)
        return ending, f"NoAnswerError: {reason}" if isinstance(error, NoAnswerError) else reason

    @property
    def is_changing(self) -> bool:
        """True if any instance is switching its role."""
        return any(one.service.is_switching for one in self._instances.values())

    def check_leaves(self, instance: Instance) -> None:
        """Raise MigrationError if an instance is switching, or no other serves one of its legs."""
        instance.service.check_drain()
        self._check_served(instance, frozenset())

    def _check(self, instance: Instance, role: Role, step_tokens: int) -> None:
        if instance.role is role and step_tokens == instance.step_tokens:
            does = "does both" if role is Role.COLOCATED else f"is for {role.value}"
            raise MigrationError(f"instance {instance.id} {does} already")
        if not instance.is_ready:
            raise MigrationError(f"instance {instance.id} does not serve at present")
        instance.service.check_switch()
        self._check_served(instance, role.legs)

    def _check_served(self, instance: Instance, legs: frozenset[Role]) -> None:
        """Raise MigrationError if a leg is unserved once ``instance`` serves only ``legs``."""
        if left := self._left_alone(instance, legs):
            raise MigrationError(
                f"instance {instance.id} is the only one that serves {left.value}: "
                "switch another one to it first"
            )

    def _left_alone(self, instance: Instance, legs: frozenset[Role]) -> Role | None:
        """Return a leg that no instance would serve if ``instance`` served ``legs``; None for none.

        Another instance that is switching counts only for the legs that it serves both before and
        after its switch, so that neither the order nor the failure of several switches matters.
        """
        served = set(legs)
        for other in self._instances.values():
            if other is not instance and other.takes_requests:
                served |= other.role.legs & (other.service.next_role or other.role).legs
        return next((leg for leg in (Role.PREFILL, Role.DECODE) if leg not in served), None)

    async def _switch(
        self,
        change: RoleChange,
        instance: Instance,
        role: Role,
        timeout_s: float,
        drain_s: float,
        step_tokens: int,
    ) -> None:
        try:
            while True:
                change.num_left = instance.inflight_requests
                self._check_goes_on(change, instance, role, timeout_s)
                if not change.num_left or change.seconds >= drain_s:
                    break
                await self._clock.sleep(_POLL_S)
            await self._adopt(change, instance, role, step_tokens)
        finally:
            instance.service.end_switch()

    async def _adopt(
        self, change: RoleChange, instance: Instance, role: Role, step_tokens: int
    ) -> None:
        """Change budget and role; the budget first, since only the engine can refuse."""
        before = instance.step_tokens
        try:
            await instance.take_budget(role, step_tokens)
            change.num_left = instance.inflight_requests
            self._check_goes_on(change, instance, role, inf)
            if role is not instance.role:
                instance.set_role(role)
        except BaseException:
            if instance.is_ready:
                await instance.take_budget(instance.role, before)
            raise
        logger.info("instance %s is for %s from here on", instance.id, role.value)

    def _check_goes_on(
        self, change: RoleChange, instance: Instance, role: Role, timeout_s: float
    ) -> None:
        """Raise the error that ends the switch if the role must not change."""
        self._check_wanted(change)
        if not instance.is_ready:
            raise MigrationError("the instance has ended")
        if left := self._left_alone(instance, role.legs):
            raise MigrationError(f"no other instance serves {left.value} any more")
        if change.num_left and self._timed(change).seconds >= timeout_s:
            raise OperationAbortedError(
                f"{change.num_left} requests are left after {timeout_s:g} s", "timed out"
            )


class Drains:
    """Drains of instances: each receives no more requests, and its streams move elsewhere at once.

    The instance keeps serving while the streams leave. It stays drained until it is released, and
    may be ended meanwhile.

    Args:
        roles: Role switches; they check whether other instances serve a drained instance's legs.
    """

    def __init__(self, instances: Mapping[InstanceId, Instance], roles: Roles) -> None:
        self._instances = instances
        self._roles = roles

    def begin(self, name: str) -> DrainState:
        """Send an instance no more requests, and move its streams; a running prompt is completed.

        Raises:
            UserError: There is no such instance.
            MigrationError: No other instance serves one of its legs, or it is switching its role.
        """
        instance = self._named(name)
        self.empty(instance, instance.service.drain)
        return self._state(instance)

    def empty(self, instance: Instance, drain: Callable[[], None]) -> None:
        """Drain an instance by ``drain``, a method of its ``ServiceState``, and move its streams.

        Raises:
            MigrationError: No other instance serves one of its legs, or it is switching its role.
        """
        if not instance.service.is_drained:
            self._roles.check_leaves(instance)
        drain()
        num_moved = instance.move_streams()
        logger.info("instance %s is drained: %d streams go on elsewhere", instance.id, num_moved)

    def release(self, name: str) -> DrainState:
        """Let an instance serve again.

        Raises:
            UserError: There is no such instance.
            MigrationError: The instance was not drained, or is being removed.
        """
        instance = self._named(name)
        instance.service.release()
        return self._state(instance)

    async def state(self, name: str, wait_s: float = 0.0) -> DrainState:
        """Return the drain state, after waiting up to ``wait_s`` for the last request to leave.

        Raises:
            UserError: There is no such instance.
        """
        instance = self._named(name)
        deadline_s = asyncio.get_running_loop().time() + wait_s
        while instance.service.is_drained and instance.inflight_requests:
            if asyncio.get_running_loop().time() >= deadline_s:
                break
            await asyncio.sleep(_POLL_S)
        return self._state(instance)

    def _named(self, name: str) -> Instance:
        check_known("instance", name, self._instances)
        return self._instances[InstanceId(name)]

    @staticmethod
    def _state(instance: Instance) -> DrainState:
        return DrainState(instance.id, instance.service.is_drained, instance.inflight_requests)
