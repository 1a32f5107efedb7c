"""Settings that an engine is started with, and the identity of its weights."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import xxhash

from banaserve.engine.vllm.compat.config import VllmConfig
from banaserve.engine.vllm.kv_connector.block_hash import describe_weights
from banaserve.engine.vllm.roles.role_switch import Budgets


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What an engine is started with; another one for each rolling restart that changes something.

    Attributes:
        config: vLLM's.
        budgets: Of the roles, within what the engine is made for.
        weights: As ``weights_of`` says of ``config``; empty where that has not been asked.
        argv: vLLM's options that ``config`` was made of; empty where they are those that the
            launcher was made with.
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
