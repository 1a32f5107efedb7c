"""Shape of a JSON text, read from its bytes: counts of the objects that parsing it would make.

Nothing is parsed: numpy scans a MiB at a time and lets other threads run meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

_STEP_BYTES = 2**20
_QUOTE, _COMMA, _COLON, _OPENS, _CLOSES = 0x22, 0x2C, 0x3A, 0x7B, 0x7D
_CASE_BIT = 0x20
"""Bit that turns ``[`` and ``]`` into ``{`` and ``}``."""

_CONTAINER_BYTES, _STRING_BYTES, _NUMBER_BYTES = 240, 80, 40
"""Memory that Python needs for an empty object or array, a short string or key, and a number, each
with the reference to it."""


@dataclass(frozen=True, slots=True)
class JsonShape:
    """Counts of a JSON text's objects.

    Attributes:
        containers: Number of objects and arrays.
        keys: Number of members of objects.
        values: Number of members of objects and elements of arrays; 1 for an empty container.
        strings: Number of strings, keys included.
        depth: Nesting depth of containers.
    """

    containers: int = 0
    keys: int = 0
    values: int = 0
    strings: int = 0
    depth: int = 0

    @property
    def object_bytes(self) -> int:
        """Return the estimated memory of the parsed objects, without the text of the strings."""
        numbers = max(0, self.values - self.strings + self.keys)
        return (
            self.containers * _CONTAINER_BYTES
            + self.strings * _STRING_BYTES
            + numbers * _NUMBER_BYTES
        )


def upper_bound(body: bytes) -> JsonShape:
    """Return counts that no JSON text of these bytes exceeds; quick, does not skip strings.

    The commas of prose in strings count as well, so the bound of such a text is high.
    """
    containers = body.count(b"{") + body.count(b"[")
    return JsonShape(
        containers=containers,
        keys=body.count(b":"),
        values=body.count(b",") + containers,
        strings=body.count(b'"') // 2,
        depth=containers,
    )


def measure(body: bytes) -> JsonShape:
    """Return the counts of ``body``; a text that is no JSON yields some counts too."""
    containers = keys = commas = quotes = depth = deepest = 0
    for part in _parts(body):
        is_quote = part == _QUOTE
        # uint8 wraps around, which keeps the parity.
        is_outside = (np.cumsum(is_quote, dtype=np.uint8) + (quotes & 1)) & 1 == 0
        quotes += int(np.count_nonzero(is_quote))
        outside = part[is_outside]
        commas += int(np.count_nonzero(outside == _COMMA))
        keys += int(np.count_nonzero(outside == _COLON))
        outside = outside | _CASE_BIT
        brackets = outside[(outside == _OPENS) | (outside == _CLOSES)]
        if brackets.size:
            steps = np.where(brackets == _OPENS, 1, -1).cumsum(dtype=np.int64)
            containers += int(np.count_nonzero(brackets == _OPENS))
            deepest = max(deepest, depth + int(steps.max()))
            depth += int(steps[-1])
    return JsonShape(containers, keys, commas + containers, quotes // 2, deepest)


def _parts(body: bytes) -> Iterator[np.ndarray]:
    """Yield ``body`` in parts, with escapes masked: an escaped quote does not end a string."""
    start = 0
    while start < len(body):
        part = body[start : start + _STEP_BYTES]
        num_slashes = len(part) - len(part.rstrip(b"\\"))
        if num_slashes % 2:
            part = body[start : start + len(part) + 1]
        start += len(part)
        if b"\\" in part:
            part = part.replace(b"\\\\", b"__").replace(b'\\"', b"__")
        yield np.frombuffer(part, np.uint8)
