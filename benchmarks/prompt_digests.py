"""Prompts as chains of digests, which the simulated replicas take for tokens."""

from __future__ import annotations

from hashlib import blake2b

from banaserve_route.sim.replica import BLOCK_TOKENS, UNIT_BYTES

CHARS_A_TOKEN = 4
_BLOCK_CHARS = BLOCK_TOKENS * CHARS_A_TOKEN


def digests(text: bytes) -> bytes:
    """Return a chained digest for each whole block of ``text``."""
    units, unit = [], b""
    for start in range(0, len(text) - _BLOCK_CHARS + 1, _BLOCK_CHARS):
        block = unit + text[start : start + _BLOCK_CHARS]
        unit = blake2b(block, digest_size=UNIT_BYTES).digest()
        units.append(unit)
    return b"".join(units)
