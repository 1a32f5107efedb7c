"""Secrets from files, because every user of a machine can see command lines."""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path
from typing import Any

from banaserve.base.arguments import derived, extra
from banaserve.base.errors import UserError

CLUSTER_KEY_VARIABLE = "BANASERVE_CLUSTER_KEY"
"""Variable with the key of a server and its nodes."""
PEER_KEY_VARIABLE = "BANASERVE_KV_STORE_PEER_KEY"
"""Variable with the key of linked stores, also for the daemon, whose command line is public."""
_MAX_BYTES = 1 << 20


def read_keys(option: str, path: Path) -> tuple[str, ...]:
    """Return the keys in a file, one per line, without empty lines and those that begin with ``#``.

    Raises:
        UserError: The file cannot be read, or holds no valid key.
    """
    try:
        with path.open("rb") as file:
            said = file.read(_MAX_BYTES + 1)
        lines = [line.strip() for line in said.decode("ascii").splitlines()]
    except OSError as error:
        raise UserError(f"{option} {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{option} {path}: keys are ASCII text, one a line") from error
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise UserError(f"{option} {path}: it holds no key: write one a line")
    if len(said) > _MAX_BYTES or any(" " in key or "\t" in key for key in keys):
        raise UserError(f"{option} {path}: write one key a line, without spaces")
    return keys


def key_option(
    name: str,
    help: str,
    file_help: str,
    variable: str,
    *,
    group: str = "",
    is_repeated: bool = False,
    **settings: Any,
) -> Any:
    """Declare a field with the key that an option, a file or an environment variable gives.

    Args:
        name: Name of the option; that of the file's option ends with ``-file``.
        help: Help text of the option; empty if only a file and the variable can give the key.
        is_repeated: True if the field is a tuple, with all keys of the option and the file.
    """
    dest = name.lstrip("-").replace("-", "_")
    default: Any = () if is_repeated else None
    file = extra(f"{name}-file", file_help, kind=Path, metavar="FILE", group=group)

    def read(known: Namespace) -> str | tuple[str, ...]:
        given, path = getattr(known, dest, default), getattr(known, f"{dest}_file")
        usual = os.environ.get(variable, "")
        keys = read_keys(f"{name}-file", path) if path is not None else ()
        if is_repeated:
            return (*given, *keys) or ((usual,) if usual else ())
        if not keys:
            return given or usual
        if given is not None:
            raise UserError(f"{name} and {name}-file exclude each other: leave out {name}")
        if len(keys) > 1:
            raise UserError(f"{name}-file {path}: it holds {len(keys)} keys: write one")
        return keys[0]

    own = (extra(name, help, default, group=group, **settings),) if help else ()
    return derived(() if is_repeated else "", read, *own, file, is_shown=False)
