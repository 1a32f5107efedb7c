"""How much an engine may do in one step, by the role that it has."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from vllm.config import VllmConfig

from banaserve.config import Budget, ServeConfig
from banaserve.engine.vllm import compat_budgets
from banaserve.errors import NoAnswerError, UserError
from banaserve.types import Role

_ANSWER_S = 30.0
"""An engine answers between two steps, and one with a long prompt takes its time."""


class Budgets:
    """The budgets of prefill and of decode; what is not given is the engine's own.

    Raises:
        UserError: One is more than the engines are made for, or allows fewer tokens than requests.
    """

    def __init__(self, given: Mapping[Role, Budget], config: VllmConfig) -> None:
        own_tokens, own_requests = compat_budgets.own_budget(config)
        self._own = Budget(own_tokens, own_requests)
        self._given = {role: _filled(role, one, self._own) for role, one in given.items() if one}

    @classmethod
    def of(cls, config: ServeConfig, engine: VllmConfig) -> Budgets:
        """Those that ``banaserve serve`` was given."""
        given = {Role.PREFILL: config.prefill_budget, Role.DECODE: config.decode_budget}
        return cls(given, engine)

    def of_role(self, role: Role) -> Budget:
        return self._given.get(role, self._own)

    async def give(self, llm: Any, role: Role) -> Budget:
        """Let the engine behind ``llm`` work with the budget of ``role`` from its next step on.

        Raises:
            NoAnswerError: It does not say in time that it does.
        """
        budget = self.of_role(role)
        if self._given:
            asked = (compat_budgets.UTILITY, budget.num_tokens, budget.num_requests)
            try:
                async with asyncio.timeout(_ANSWER_S):
                    await llm.engine_core.call_utility_async(*asked)
            except TimeoutError:
                said = f"the engine has not taken its budget in {_ANSWER_S:.0f} s"
                raise NoAnswerError(said) from None
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
