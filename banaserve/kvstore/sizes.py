"""Byte counts in human-readable units."""

from __future__ import annotations

import re

from banaserve.base.errors import UserError

_UNIT_BYTES = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SIZE = re.compile(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([a-z]*)\s*", re.ASCII | re.IGNORECASE)


def parse_size(text: str) -> int:
    """Parse a number of bytes with a unit, such as ``2GiB``, ``512MB`` or ``4096``.

    Raises:
        UserError: ``text`` is not a size, has an unknown unit, or is less than one byte.
    """
    match = _SIZE.fullmatch(text)
    unit_bytes = _UNIT_BYTES.get(match[2].lower()) if match else None
    if match is None or unit_bytes is None:
        raise UserError(f"{text!r} is not a size: write a number and a unit, such as 2GiB or 512MB")
    size_bytes = int(float(match[1]) * unit_bytes)
    if size_bytes < 1:
        raise UserError(f"{text!r} is less than one byte")
    return size_bytes


def format_size(size_bytes: int) -> str:
    """Format a size in the largest binary unit that keeps it at 1 or more, such as ``1.5 GiB``."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        unit_bytes = _UNIT_BYTES[unit.lower()]
        if size_bytes >= unit_bytes:
            return f"{size_bytes / unit_bytes:.4g} {unit}"
    return f"{size_bytes} B"
