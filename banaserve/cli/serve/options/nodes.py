"""Options of the machines that engines run on."""

from __future__ import annotations

import argparse
from pathlib import Path

from banaserve.access.key_files import key_of
from banaserve.nodes.options import KEY_VARIABLE, key_from_environment


def add_nodes(parser: argparse.ArgumentParser) -> None:
    """Add these options to ``parser``."""
    add = parser.add_argument
    add(
        "--node",
        action="append",
        default=[],
        metavar="HOST:PORT",
        help="run the engines on another machine, where `banaserve node` listens; repeat for "
        "several",
    )
    add(
        "--cluster",
        default="",
        metavar="ADDRESS",
        help="run the engines on the nodes of a Ray cluster: its address, or auto for the one that "
        "this machine is in",
    )
    add(
        "--cluster-key-file",
        type=Path,
        metavar="FILE",
        help=f"file with the key that this server and its nodes share (${KEY_VARIABLE})",
    )


def cluster_key_of(known: argparse.Namespace) -> str:
    """Return the key of the server and its nodes, from the file or the variable.

    Raises:
        UserError: The file cannot be used.
    """
    return key_of("--cluster-key", None, known.cluster_key_file, key_from_environment())
