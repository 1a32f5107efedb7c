"""Settings for the start of an engine, its step budgets, and the identity of its weights."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import xxhash

from banaserve.base.config.serve_config import Budget, ServeConfig
from banaserve.base.errors import NoAnswerError, UserError
from banaserve.base.types import Role
from banaserve.contracts.rpc.engine_api import CoreApi
from banaserve.contracts.rpc.typed_rpc import call
from banaserve.engine.compat import engine as compat
from banaserve.engine.compat.config import VllmConfig, own_budget
from banaserve.engine.connector.block_hash import describe_weights

_ANSWER_S = 30.0
"""Maximum wait for an engine's answer, in seconds.

An engine answers between two steps, and a step with a long prompt takes long.
"""


class Budgets:
    """Step budgets of prefill and of decode; the engine's own budget where none is given.

    Args:
        given: Budget by role; 0 in a budget stands for the engine's own number.

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
        given = {Role.PREFILL: config.prefill_budget, Role.DECODE: config.decode_budget}
        return cls(given, engine)

    def of_role(self, role: Role) -> Budget:
        return self._given.get(role, self._own)

    def of_steps(self, role: Role, step_tokens: int) -> Budget:
        """Return the budget of ``role`` with steps of ``step_tokens`` tokens, as near as possible.

        A step has room for one token of each running request, and at most for the number of tokens
        that the engines are made for. With 0 ``step_tokens``, steps are those of the role.
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


class RoleEngine(NamedTuple):
    """Configuration of the engines of a role.

    Attributes:
        argv: vLLM's options that ``config`` was made from; empty for those that the launcher was
            made with.
    """

    config: VllmConfig
    argv: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings for the start of an engine; a rolling restart that changes them makes new ones.

    Attributes:
        config: vLLM's configuration, except for the roles in ``by_role``.
        budgets: Step budgets of the roles, within the limits that the engine is made for.
        weights: Identity of the weights, from ``weights_of(config)``; empty if not yet computed.
        argv: vLLM's options that ``config`` was made from; empty for those that the launcher was
            made with.
        model: Name or folder of the model that a restart set; empty if none has.
        options: vLLM's options that restarts have added to those of ``banaserve serve``.
        number: Number of changes since the server's start; 0 for the first settings.
        by_role: Configurations of engines that are made for one role, if they differ; an engine
            keeps its configuration when its instance changes its role.
    """

    config: VllmConfig
    budgets: Budgets
    weights: str = ""
    argv: tuple[str, ...] = ()
    model: str = ""
    options: tuple[str, ...] = ()
    number: int = 0
    by_role: Mapping[Role, RoleEngine] = field(default_factory=dict)

    def engine_for(self, role: Role) -> RoleEngine:
        """Return the configuration of an engine that is made for ``role``."""
        return self.by_role.get(role, RoleEngine(self.config, self.argv))


def weights_of(config: VllmConfig) -> str:
    """Return the identity of an engine's weights, as 32 hex digits.

    Two engines have the same identity if one can continue a stream that the other has begun. It is
    for streams what ``kvstore/fingerprint.py:Fingerprint`` is for KV blocks, and does not need a
    store. Reads some pages of the model's files; blocks.

    Raises:
        OSError: A file of the model cannot be read.
    """
    model = config.model_config
    said = (
        str(model.model),
        str(model.revision or ""),
        str(model.dtype),
        str(config.cache_config.cache_dtype),
        describe_weights(model, str(config.load_config.load_format)),
    )
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(said))
