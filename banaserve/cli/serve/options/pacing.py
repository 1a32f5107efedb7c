"""Options of modelled time."""

from __future__ import annotations

import argparse

from banaserve.config import ServeConfig

_DEFAULTS = ServeConfig()


def add_pacing(parser: argparse.ArgumentParser) -> None:
    """Add these options to ``parser``."""
    add = parser.add_argument
    add(
        "--pace",
        default=_DEFAULTS.pace,
        metavar="PROFILE[,PROFILE...]",
        help="model the time of a GPU and model: a profile's name or .toml file (a miniature runs "
        "unless --model is given), or one for each instance, prefill first, all of one model",
    )
    add(
        "--dilate",
        type=float,
        default=_DEFAULTS.dilate,
        metavar="N",
        help="with --pace: wall seconds of one modelled second",
    )
