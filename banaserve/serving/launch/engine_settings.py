"""Settings for the start of an engine, and the identity of an engine's weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import xxhash

from banaserve.base.types import Role
from banaserve.engine.compat.config import VllmConfig
from banaserve.engine.connector.block_hash import describe_weights
from banaserve.serving.launch.budgets import Budgets


class RoleEngine(NamedTuple):
    """Configuration of the engines of a role.

    Attributes:
        config: vLLM's configuration.
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
