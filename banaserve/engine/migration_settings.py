"""Settings of live migration that an engine starts with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from banaserve.base.config.serve_config import (
    DEFAULT_MICROBATCHES,
    GUEST_STALL_ON_CPU_S,
    MAX_MICROBATCHES,
    MIGRATION_ATTENTION,
)
from banaserve.base.errors import UserError
from banaserve.base.text.names import check_known
from banaserve.engine.compat.config import VllmConfig
from banaserve.engine.engine_args import MIGRATION_KEY as KEY
from banaserve.engine.engine_args import section

ATTENTION_KERNELS = tuple(
    choice for choice in MIGRATION_ATTENTION if choice not in ("auto", "vllm")
)
"""Choices that use our kernels: ``kernels`` lets the registry pick, the others name its pick."""


class MigrationSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options in vLLM's ``additional_config``, as ``banaserve_migration``.

    Attributes:
        kv_growth: Maximum size of the pool as a multiple of its initial blocks; it reserves address
            space, not memory.
        stall_s: Maximum time a guest may neither answer nor use its processor, in seconds; five
            times as long for a guest of several processes.
        overlap: Maximum number of micro-batches of a step, for host and guests to compute
            concurrently; 1: the host waits for its guests.
        guest_saves: True if guests copy the KV of their layers to the store themselves.
        poison: True to overwrite KV that has moved away with NaN, for tests.
        attention: Attention implementation of the engine and its guests, see ``kernels_for``.
    """

    kv_growth: float = 2.0
    stall_s: float = GUEST_STALL_ON_CPU_S
    overlap: int = DEFAULT_MICROBATCHES
    guest_saves: bool = True
    poison: bool = False
    attention: str = "auto"


def settings_of(config: VllmConfig) -> MigrationSettings | None:
    """Return the settings of an engine; None if it does not migrate.

    Raises:
        UserError: The settings are malformed.
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
    """Return whether KV on a CPU has the layout of our kernels, which pack nothing, not vLLM's."""
    return settings is not None and settings.attention in ATTENTION_KERNELS


def migration_options(settings: MigrationSettings, given: Mapping[str, Any]) -> list[str]:
    """Return vLLM's options of an engine whose layers and heads can move.

    Args:
        given: The user's own ``--additional-config``, which is kept.

    Raises:
        UserError: ``given`` has settings of migration, or cannot be combined with them.
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
    # vLLM merges options of this form, and they override one whole --additional-config. It would
    # also append a list to that of the user's own option of this form; a null in between prevents
    # that.
    found: list[str] = []
    for key, value in {**given, KEY: msgspec.to_builtins(settings)}.items():
        values = [None, value] if key in given and isinstance(value, (list, dict)) else [value]
        for one in values:
            found += [f"--additional-config.{key}", json.dumps(one)]
    return found
