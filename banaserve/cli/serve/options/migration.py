"""Options on live migration."""

from __future__ import annotations

import argparse

from banaserve.config import MIGRATION_ATTENTION, ServeConfig
from banaserve.transport import registry

_DEFAULTS = ServeConfig()


def add_migration(parser: argparse.ArgumentParser) -> None:
    """Add them to ``parser``."""
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
        help="address space to reserve for KV blocks, in terms of those at the start",
    )
    add(
        "--migration-stall",
        type=float,
        default=_DEFAULTS.migration_stall_s,
        metavar="S",
        help="a guest that is silent for so much longer than its work takes is given up",
    )
    add(
        "--migration-overlap",
        type=int,
        default=_DEFAULTS.migration_overlap,
        metavar="N",
        help="cut steps into at most so many micro-batches, so that an instance and the guests of "
        "its layers compute at once; 1: it waits for them, which is better where they share cores",
    )
    add(
        "--migration-guest-share",
        type=float,
        default=_DEFAULTS.migration_guest_share,
        metavar="FRACTION",
        help="of an instance's device, that guests of others beside it may take together",
    )
    add(
        "--migration-guest-saves",
        choices=("on", "off"),
        default="on" if _DEFAULTS.migration_guest_saves else "off",
        help="whether a guest saves the KV of its layers to the store, or sends it to its host, "
        "which does",
    )
    add(
        "--migration-transport",
        choices=registry.names(),
        default=_DEFAULTS.migration_transport,
        help="by which KV and activations travel between an instance and its guests",
    )
    add(
        "--migration-attention",
        choices=MIGRATION_ATTENTION,
        default=_DEFAULTS.migration_attention,
        help="what instances and guests attend with: vLLM's kernels, or ours, which know parts of "
        "the heads and of the context on every device; auto: vLLM's on a CPU, ours for what has "
        "moved on a GPU",
    )
    add("--migration-poison", action="store_true", help="fill what moved away with NaN: for tests")
