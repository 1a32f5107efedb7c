"""Secrets from files, because every user of a machine can see command lines."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from banaserve.errors import UserError

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


def read_key(option: str, path: Path) -> str:
    """Return the only key in a file.

    Raises:
        UserError: The file cannot be read, or does not hold exactly one key.
    """
    keys = read_keys(option, path)
    if len(keys) > 1:
        raise UserError(f"{option} {path}: it holds {len(keys)} keys: write one")
    return keys[0]


def key_of(option: str, given: str | None, path: Path | None, usual: str) -> str:
    """Return the key that an option or its ``-file`` option gives; ``usual`` without both.

    Args:
        option: Name of the option, without ``-file``.

    Raises:
        UserError: Both options are given, or the file cannot be used.
    """
    if path is None:
        return given or usual
    if given is not None:
        raise UserError(f"{option} and {option}-file exclude each other: leave out {option}")
    return read_key(f"{option}-file", path)


def keys_of(
    option: str, given: Iterable[str], path: Path | None, usual: Iterable[str]
) -> tuple[str, ...]:
    """Return all keys that an option and its ``-file`` option give; ``usual`` without both.

    Raises:
        UserError: The file cannot be used.
    """
    found = (*given, *(read_keys(f"{option}-file", path) if path is not None else ()))
    return found or tuple(usual)
