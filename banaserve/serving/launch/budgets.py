"""Limits of an engine's steps, by the role of its instance."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from banaserve.base.config import Budget, ServeConfig
from banaserve.base.errors import NoAnswerError, UserError
from banaserve.base.types import Role
from banaserve.contracts.rpc.engine_api import CoreApi
from banaserve.contracts.rpc.typed_rpc import call
from banaserve.engine.compat import engine as compat
from banaserve.engine.compat.config import VllmConfig, own_budget

_ANSWER_S = 30.0
"""Maximum wait for an engine's answer, in seconds.

An engine answers between two steps, and a step with a long prompt takes long.
"""


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
