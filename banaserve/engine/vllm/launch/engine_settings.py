"""Settings that an engine is started with, and the identity of its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import xxhash

from banaserve.engine.vllm.compat.config import VllmConfig
from banaserve.engine.vllm.kv_connector.block_hash import describe_weights
from banaserve.engine.vllm.roles.role_switch import Budgets
from banaserve.types import Role


class RoleEngine(NamedTuple):
    """What engines that are made for one role have instead: another tensor-parallel degree.

    Attributes:
        config: vLLM's.
        argv: vLLM's options that it was made of.
    """

    config: VllmConfig
    argv: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What an engine is started with; another one for each rolling restart that changes something.

    Attributes:
        config: vLLM's, but for roles in ``by_role``.
        budgets: Of the roles, within what the engine is made for.
        weights: As ``weights_of`` says of ``config``; empty where that has not been asked.
        argv: vLLM's options that ``config`` was made of; empty where they are those that the
            launcher was made with.
        by_role: Engines that are made for a role, where they are not like the others; an engine
            stays as it was made when its instance takes another role.
        model: Name or folder of the model, where a restart has named one.
        options: vLLM's options that restarts have added to those of ``banaserve serve``.
        number: 0 at the start, and one more with each change.
    """

    config: VllmConfig
    budgets: Budgets
    weights: str = ""
    argv: tuple[str, ...] = ()
    model: str = ""
    options: tuple[str, ...] = ()
    number: int = 0
    by_role: Mapping[Role, RoleEngine] = field(default_factory=dict)

    def config_for(self, role: Role) -> VllmConfig:
        """vLLM's configuration of an engine that is made for ``role``."""
        own = self.by_role.get(role)
        return self.config if own is None else own.config

    def argv_for(self, role: Role) -> tuple[str, ...]:
        """vLLM's options of an engine that is made for ``role``, as ``argv``."""
        own = self.by_role.get(role)
        return self.argv if own is None else own.argv


def weights_of(config: VllmConfig) -> str:
    """32 hex digits that two engines share where one can go on with what the other has begun.

    It is to a stream what ``kvstore/fingerprint.py:Fingerprint`` is to a KV block, with or without
    a store. Reads some pages of the model's files; blocking.

    Raises:
        OSError: One of them cannot be read.
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
