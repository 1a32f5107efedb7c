"""Role switches: drain an instance, then give it another role, without a restart.

``Budgets`` limits the steps of an engine by the role of its instance.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from math import inf
from typing import Any, Protocol

from banaserve.base.clock import Clock
from banaserve.base.config import Budget, ServeConfig
from banaserve.base.errors import MigrationError, NoAnswerError, UserError
from banaserve.base.names import check_known
from banaserve.base.types import InstanceId, Role
from banaserve.contracts.instances import RoleChange
from banaserve.contracts.rpc.engine_api import CoreApi
from banaserve.contracts.rpc.typed_rpc import call
from banaserve.engine.compat import engine as compat
from banaserve.engine.compat.config import VllmConfig, own_budget
from banaserve.serving.operations import Operations

_ANSWER_S = 30.0
"""Maximum wait for an engine's answer, in seconds.

An engine answers between two steps, and a step with a long prompt takes long.
"""
logger = logging.getLogger(__name__)
_POLL_S = 0.02
_WORDS = (Role.PREFILL.value, Role.DECODE.value, "both", Role.COLOCATED.value)


class Budgets:
    """Step budgets of prefill and of decode; the engine's own budget where none is given.

    Args:
        given: Budget by role; 0 in a budget stands for the engine's own number.
        config: vLLM's configuration of the engines.

    Raises:
        UserError: A budget exceeds what the engines are made for, or allows fewer tokens than
            requests.
    """

    def __init__(self, given: Mapping[Role, Budget], config: VllmConfig) -> None:
        own_tokens, own_requests = own_budget(config)
        self._own = Budget(own_tokens, own_requests)
        self._given = {role: _filled(role, one, self._own) for role, one in given.items() if one}

    @classmethod
    def of(cls, config: ServeConfig, engine: VllmConfig) -> Budgets:
        """Return the budgets that ``banaserve serve`` was given."""
        given = {Role.PREFILL: config.prefill_budget, Role.DECODE: config.decode_budget}
        return cls(given, engine)

    def of_role(self, role: Role) -> Budget:
        return self._given.get(role, self._own)

    def of_steps(self, role: Role, step_tokens: int) -> Budget:
        """Return the budget of ``role`` with steps of ``step_tokens`` tokens, as near as possible.

        A step has room for one token of each running request, and at most for the number of tokens
        that the engines are made for.

        Args:
            role: Role of the instance.
            step_tokens: Maximum number of tokens of a step; 0 for the default of the role.
        """
        budget = self.of_role(role)
        if not step_tokens:
            return budget
        tokens = min(max(step_tokens, budget.num_requests), self._own.num_tokens)
        return Budget(tokens, budget.num_requests)

    async def give(
        self, llm: Any, role: Role, step_tokens: int = 0, *, always: bool = False
    ) -> Budget:
        """Set the budget of the engine behind ``llm`` to that of ``role``, from its next step on.

        Args:
            llm: Client of the engine.
            role: Role of the instance.
            step_tokens: Maximum number of tokens of a step; 0 for the default of the role.
            always: True to send the budget even if no role has a budget of its own.

        Raises:
            NoAnswerError: The engine has not confirmed the budget in time.
            ProtocolError: The engine's answer is not a confirmation.
        """
        budget = self.of_steps(role, step_tokens)
        if self._given or always:
            asked = call(CoreApi.banaserve_set_budget, budget.num_tokens, budget.num_requests)
            try:
                async with asyncio.timeout(_ANSWER_S):
                    reply = await compat.call_utility(llm, asked.name, *asked.args)
            except TimeoutError:
                said = f"the engine has not taken its budget in {_ANSWER_S:.0f} s"
                raise NoAnswerError(said) from None
            asked.read(reply)
        return budget


def _filled(role: Role, given: Budget, own: Budget) -> Budget:
    filled = Budget(given.num_tokens or own.num_tokens, given.num_requests or own.num_requests)
    limits = (
        ("max-num-batched-tokens", filled.num_tokens, own.num_tokens),
        ("max-num-seqs", filled.num_requests, own.num_requests),
    )
    for name, wanted, most in limits:
        if wanted > most:
            raise UserError(
                f"--{role.value}-{name} {wanted} is above what the engines are made for: "
                f"give --{name} {wanted} too (it is {most})"
            )
    if filled.num_tokens < filled.num_requests:
        raise UserError(
            f"--{role.value}-max-num-batched-tokens {filled.num_tokens} is below "
            f"--{role.value}-max-num-seqs {filled.num_requests}: each running request takes one"
        )
    return filled


class RoleInstance(Protocol):
    """The part of an ``Instance`` that a role switch needs."""

    id: InstanceId
    role: Role
    is_draining: bool
    is_held: bool
    is_leaving: bool
    step_tokens: int

    @property
    def inflight_requests(self) -> int: ...

    @property
    def is_ready(self) -> bool: ...

    def set_role(self, role: Role) -> None: ...

    async def take_budget(self, role: Role, step_tokens: int = 0) -> None: ...


class Roles(Operations[RoleChange]):
    """Role switches of instances: each drains its instance, and then changes the role.

    The engine knows no role, so a leg that arrives late is served all the same; an instance is
    drained only so that work of one role does not slow down that of the other. A switch to
    ``colocated`` drains nothing. An instance with a ``drain_s`` of 0 serves on until its role has
    changed.

    Args:
        instances: Instances by id; they may die and be restarted.
    """

    def __init__(self, instances: Mapping[InstanceId, RoleInstance], clock: Clock) -> None:
        super().__init__("role switch", "r", clock)
        self._instances = instances
        self._changing: dict[InstanceId, Role] = {}

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
            name: Id of the instance.
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
        self._keep(change)
        if role in (Role.COLOCATED, instance.role):
            drain_s = 0.0
        instance.is_draining = drain_s > 0
        self._changing[instance.id] = role
        self._carry_out(change, self._run(change, instance, role, timeout_s, drain_s, step_tokens))
        return change

    def _abort(self, state: RoleChange) -> None:
        """Abort the switch at once: the instance keeps its role."""
        state.state = "aborted"

    @property
    def is_changing(self) -> bool:
        """True if any instance is switching its role."""
        return bool(self._changing)

    def is_held(self, instance: InstanceId) -> bool:
        """Return whether the instance is drained, and so receives no requests."""
        return self._instances[instance].is_held

    def check_leaves(self, instance: RoleInstance) -> None:
        """Return if an instance may be drained: it is not switching, and others serve its legs.

        Raises:
            MigrationError: The instance may not be drained.
        """
        if instance.id in self._changing:
            raise MigrationError(f"instance {instance.id} is switching its role")
        if left := self._left_alone(instance, instance.role, frozenset()):
            raise MigrationError(
                f"instance {instance.id} is the only one that serves {left.value}: "
                "switch another one to it first"
            )

    # ---- checks

    def _check(self, instance: RoleInstance, role: Role, step_tokens: int) -> None:
        if instance.role is role and step_tokens == instance.step_tokens:
            does = "does both" if role is Role.COLOCATED else f"is for {role.value}"
            raise MigrationError(f"instance {instance.id} {does} already")
        if instance.id in self._changing:
            raise MigrationError(f"instance {instance.id} is switching its role already")
        if not instance.is_ready:
            raise MigrationError(f"instance {instance.id} does not serve at present")
        if instance.is_leaving:
            raise MigrationError(f"instance {instance.id} is being restarted")
        if instance.is_held:
            raise MigrationError(
                f"instance {instance.id} is drained: `banaserve drain {instance.id} --undo` first"
            )
        if left := self._left_alone(instance, role):
            raise MigrationError(
                f"instance {instance.id} is the only one that serves {left.value}: "
                "switch another one to it first"
            )

    def _left_alone(
        self, instance: RoleInstance, role: Role, own: frozenset[Role] | None = None
    ) -> Role | None:
        """Return a leg that no instance would serve if ``instance`` had ``role``; None for none.

        Another instance that is switching counts only for the legs that it serves both before and
        after its switch, so that neither the order nor the failure of several switches matters.

        Args:
            instance: Instance that changes.
            role: New role of the instance.
            own: Legs that the instance would serve; None for those of ``role``.
        """
        served = set(role.legs if own is None else own)
        for other in self._instances.values():
            is_out = other.is_draining or other.is_held or other.is_leaving
            if other is not instance and other.is_ready and not is_out:
                served |= other.role.legs & self._changing.get(other.id, other.role).legs
        return next((leg for leg in (Role.PREFILL, Role.DECODE) if leg not in served), None)

    # ---- running

    async def _run(
        self,
        change: RoleChange,
        instance: RoleInstance,
        role: Role,
        timeout_s: float,
        drain_s: float,
        step_tokens: int,
    ) -> None:
        began_s = self._clock.now()
        try:
            while True:
                change.num_left = instance.inflight_requests
                change.seconds = self._clock.now() - began_s
                if ending := self._ending(change, instance, role, timeout_s):
                    change.state, change.reason = ending
                    break
                if not change.num_left or change.seconds >= drain_s:
                    await self._adopt(change, instance, role, step_tokens)
                    break
                await self._clock.sleep(_POLL_S)
        except asyncio.CancelledError:
            change.state, change.reason = "aborted", "the server stops"
            raise
        except Exception as broken:
            logger.exception("the role switch %s of %s", change.id, change.instance)
            change.state, change.reason = "failed", f"{type(broken).__name__}: {broken}"
        finally:
            instance.is_draining = False
            del self._changing[instance.id]

    async def _adopt(
        self, change: RoleChange, instance: RoleInstance, role: Role, step_tokens: int
    ) -> None:
        """Change budget and role; the budget first, since only the engine can refuse."""
        before = instance.step_tokens
        try:
            await instance.take_budget(role, step_tokens)
            change.num_left = instance.inflight_requests
            if ending := self._ending(change, instance, role, inf):
                change.state, change.reason = ending
                return
            if role is not instance.role:
                instance.set_role(role)
            change.state = "done"
            logger.info("instance %s is for %s from here on", instance.id, role.value)
        finally:
            if instance.role is not role and instance.is_ready:
                await instance.take_budget(instance.role, before)

    def _ending(
        self, change: RoleChange, instance: RoleInstance, role: Role, timeout_s: float
    ) -> tuple[str, str] | None:
        """Return the final state and its reason if the role must not change; None if it may."""
        if not change.is_open:
            return change.state, change.reason
        if not instance.is_ready:
            return "failed", "the instance has ended"
        if left := self._left_alone(instance, role):
            return "failed", f"no other instance serves {left.value} any more"
        if change.num_left and change.seconds >= timeout_s:
            return "timed out", f"{change.num_left} requests are left after {timeout_s:g} s"
        return None
