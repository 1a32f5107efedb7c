"""Role switches: drain an instance, then give it another role. Nothing restarts.

``Budgets`` bounds an engine's steps by its role.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from math import inf
from typing import Any, Protocol

from banaserve.clock import Clock
from banaserve.config import Budget, ServeConfig
from banaserve.engine.interface import RoleChange
from banaserve.engine.vllm.compat import engine as compat
from banaserve.engine.vllm.compat.config import VllmConfig, own_budget
from banaserve.engine.vllm.operations import Operations
from banaserve.engine.vllm.rpc.engine_api import CoreApi
from banaserve.engine.vllm.rpc.typed_rpc import call
from banaserve.errors import MigrationError, NoAnswerError, UserError
from banaserve.names import check_known
from banaserve.types import InstanceId, Role

_ANSWER_S = 30.0
"""An engine answers between two steps, and one with a long prompt takes its time."""
logger = logging.getLogger(__name__)
_POLL_S = 0.02
_WORDS = (Role.PREFILL.value, Role.DECODE.value, "both", Role.COLOCATED.value)


class Budgets:
    """The budgets of prefill and of decode; what is not given is the engine's own.

    Raises:
        UserError: One is more than the engines are made for, or allows fewer tokens than requests.
    """

    def __init__(self, given: Mapping[Role, Budget], config: VllmConfig) -> None:
        own_tokens, own_requests = own_budget(config)
        self._own = Budget(own_tokens, own_requests)
        self._given = {role: _filled(role, one, self._own) for role, one in given.items() if one}

    @classmethod
    def of(cls, config: ServeConfig, engine: VllmConfig) -> Budgets:
        """Those that ``banaserve serve`` was given."""
        given = {Role.PREFILL: config.prefill_budget, Role.DECODE: config.decode_budget}
        return cls(given, engine)

    def of_role(self, role: Role) -> Budget:
        return self._given.get(role, self._own)

    def of_steps(self, role: Role, step_tokens: int) -> Budget:
        """The budget of ``role`` in steps of ``step_tokens`` tokens, as near as engines can.

        A step has room for a token of each running request, and never more than the engines are
        made for.
        """
        budget = self.of_role(role)
        if not step_tokens:
            return budget
        tokens = min(max(step_tokens, budget.num_requests), self._own.num_tokens)
        return Budget(tokens, budget.num_requests)

    async def give(
        self, llm: Any, role: Role, step_tokens: int = 0, *, always: bool = False
    ) -> Budget:
        """Let the engine behind ``llm`` work with the budget of ``role`` from its next step on.

        Args:
            step_tokens: Of its steps; 0 is what the role has.
            always: Say so even where no role has a budget of its own.

        Raises:
            NoAnswerError: It does not say in time that it does.
            ProtocolError: It says something else.
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
    """What a role switch needs of an ``Instance``."""

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
    """Drains instances and gives them another role.

    The engine knows no role, so a leg that comes late is served all the same: draining keeps the
    work of one role from slowing down that of the other. One that will do both drains nothing, and
    one that may not drain serves on until it has the other role.

    Args:
        instances: By id; they may die and come back.
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
        """Begin to drain an instance; it has the new role when nothing is left on it.

        Args:
            step_tokens: Most tokens of its steps from then on; 0 is what the role has. With a size
                it may be the role that it has: then nothing is drained.
            timeout_s: After this it keeps its role, if it is not drained.
            drain_s: After this it has the new role, whatever is left: that runs on beside it.

        Raises:
            UserError: There is no such instance or role.
            MigrationError: It cannot have it at present.
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
        """At once: the instance keeps its role."""
        state.state = "aborted"

    @property
    def is_changing(self) -> bool:
        """Whether any instance is on its way to another role."""
        return bool(self._changing)

    def is_held(self, instance: InstanceId) -> bool:
        """Whether it is drained and sent nothing."""
        return self._instances[instance].is_held

    def check_leaves(self, instance: RoleInstance) -> None:
        """Return if an instance may be drained: it is not switching, and others serve its legs.

        Raises:
            MigrationError: It may not.
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
        """The leg that nobody would serve if ``instance`` had ``role``; None where all is well.

        Args:
            own: Legs that it would serve; those of ``role`` where none are given.

        Another one that is switching counts for the legs that it serves before and after, so that
        the order in which several get their roles does not matter, nor that one of them fails.
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
        """Budget first: the engine is asked, and the router does what it likes."""
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
        """State and reason where the role is to stay what it is."""
        if not change.is_open:
            return change.state, change.reason
        if not instance.is_ready:
            return "failed", "the instance has ended"
        if left := self._left_alone(instance, role):
            return "failed", f"no other instance serves {left.value} any more"
        if change.num_left and change.seconds >= timeout_s:
            return "timed out", f"{change.num_left} requests are left after {timeout_s:g} s"
        return None
