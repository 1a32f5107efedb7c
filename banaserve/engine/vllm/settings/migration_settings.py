"""Settings of live migration that an engine starts with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from banaserve.config import DEFAULT_MICROBATCHES, MAX_MICROBATCHES, MIGRATION_ATTENTION
from banaserve.engine.vllm.compat.config import VllmConfig
from banaserve.engine.vllm.settings.engine_args import section
from banaserve.errors import UserError
from banaserve.names import check_known

KEY = "banaserve_migration"
ATTENTION_KERNELS = tuple(
    choice for choice in MIGRATION_ATTENTION if choice not in ("auto", "vllm")
)
"""``kernels`` lets the registry pick; the others name what it has to pick."""


class MigrationSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options in vLLM's ``additional_config``, as ``banaserve_migration``.

    Attributes:
        kv_growth: How many times the blocks of the start the pool may have one day: address
            space that is reserved, not memory.
        stall_s: How long a guest may neither answer nor use its processor.
        overlap: Micro-batches of a step at most, so that host and guests compute at once; 1:
            guests are waited for.
        guest_saves: Whether guests copy the KV of their layers to the store themselves.
        poison: Overwrite KV that has moved away with NaN: for tests.
        attention: What the engine and its guests attend with, see ``attention_door``.
    """

    kv_growth: float = 2.0
    stall_s: float = 1.0
    overlap: int = DEFAULT_MICROBATCHES
    guest_saves: bool = True
    poison: bool = False
    attention: str = "auto"


def settings_of(config: VllmConfig) -> MigrationSettings | None:
    """The settings of an engine; None where it does not migrate.

    Raises:
        UserError: They are malformed.
    """
    settings = section(config, KEY, MigrationSettings)
    if settings is None:
        return None
    if settings.kv_growth < 1 or settings.stall_s <= 0:
        raise UserError(f"{KEY}: kv_growth is at least 1 and stall_s above 0")
    if not 1 <= settings.overlap <= MAX_MICROBATCHES:
        raise UserError(f"{KEY}: overlap is 1 to {MAX_MICROBATCHES} parts")
    check_known("migration attention", settings.attention, MIGRATION_ATTENTION)
    return settings


def packs_nothing(settings: MigrationSettings | None) -> bool:
    """Whether KV on a CPU lies as our kernels write it, and not as vLLM's do."""
    return settings is not None and settings.attention in ATTENTION_KERNELS


def migration_options(settings: MigrationSettings, given: Mapping[str, Any]) -> list[str]:
    """vLLM options of an engine whose layers and heads can move.

    Args:
        given: What the user's own ``--additional-config`` says, which is kept.

    Raises:
        UserError: It speaks of migration too, or cannot stand beside it.
    """
    if KEY in given:
        raise UserError(
            f"--additional-config has {KEY}: give --migration, --migration-kv-growth or "
            "--migration-stall instead"
        )
    if odd := [key for key in given if "." in key or "=" in key]:
        raise UserError(
            f"--additional-config has {odd[0]!r}: with --migration on, no key may have . or = in it"
        )
    # vLLM joins options of this form, and they win over one whole --additional-config. It would
    # also join a list to that of the user's own option of this form, unless something is between.
    found: list[str] = []
    for key, value in {**given, KEY: msgspec.to_builtins(settings)}.items():
        values = [None, value] if key in given and isinstance(value, (list, dict)) else [value]
        for one in values:
            found += [f"--additional-config.{key}", json.dumps(one)]
    return found
