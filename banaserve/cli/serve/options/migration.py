"""Options of live migration."""

from __future__ import annotations

import argparse

from banaserve.config import MIGRATION_ATTENTION, ServeConfig
from banaserve.errors import UserError
from banaserve.names import check_known
from banaserve.transport import registry

_DEFAULTS = ServeConfig()


def add_migration(parser: argparse.ArgumentParser) -> None:
    """Add these options to ``parser``."""
    add = parser.add_argument
    add(
        "--migration",
        choices=("auto", "on", "off"),
        default="auto",
        help="whether layers and heads can move between instances while they serve; auto: where "
        "model and options allow it; on: refuse to start where they do not",
    )
    add(
        "--migration-kv-growth",
        type=float,
        default=_DEFAULTS.migration_kv_growth,
        metavar="FACTOR",
        help="address space to reserve for KV blocks, as a multiple of those at the start",
    )
    add(
        "--migration-stall",
        type=float,
        default=_DEFAULTS.migration_stall_s,
        metavar="SECONDS",
        help="silence beyond the time of its work after which a guest is given up",
    )
    add(
        "--migration-overlap",
        type=int,
        default=_DEFAULTS.migration_overlap,
        metavar="N",
        help="most micro-batches that a step is cut into, so that an instance and the guests of "
        "its layers compute at once; 1: it waits for them, which is better where they share cores",
    )
    add(
        "--migration-guest-share",
        type=float,
        default=_DEFAULTS.migration_guest_share,
        metavar="FRACTION",
        help="share of an instance's device that guests of other instances may take together",
    )
    add(
        "--migration-guest-saves",
        choices=("on", "off"),
        default="on" if _DEFAULTS.migration_guest_saves else "off",
        help="who saves the KV of a guest's layers to the store: on, the guest; off, its host",
    )
    add(
        "--migration-transport",
        choices=registry.names(),
        default=_DEFAULTS.migration_transport,
        help="way of KV and activations between an instance and its guests",
    )
    add(
        "--migration-attention",
        type=_attention,
        choices=MIGRATION_ATTENTION,
        default=_DEFAULTS.migration_attention,
        help="kernels of attention: vLLM's, or banaserve's, which know parts of "
        "the heads and of the context on every device; auto: vLLM's on a CPU, "
        "and on a GPU banaserve's for what has moved",
    )
    add("--migration-poison", action="store_true", help="fill what moved away with NaN: for tests")


def _attention(given: str) -> str:
    try:
        check_known("attention", given, MIGRATION_ATTENTION)
    except UserError as unknown:
        raise argparse.ArgumentTypeError(str(unknown)) from None
    return given
