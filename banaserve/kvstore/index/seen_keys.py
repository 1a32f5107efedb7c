"""Estimate of how many of the keys added to a set were new, in 8 KiB. No I/O."""

from __future__ import annotations

import xxhash

_INDEX_BITS = 13
_NUM_REGISTERS = 1 << _INDEX_BITS
_MAX_RANK = 64 - _INDEX_BITS + 1


class SeenKeys:
    """Sketch of all keys that were ever added: HyperLogLog, read as it grows.

    A register keeps the largest rank of its keys; a key of a smaller rank changes nothing. A new
    key that does change the sketch stands for the new keys that did not: for 1 / p keys, where p is
    the probability that a new key changes it (HIP estimator: Cohen, "All-Distances Sketches,
    Revisited", 2014). The sum has no bias, and a standard error of sqrt(ln 2 / registers), 0.9%.
    """

    def __init__(self) -> None:
        self._ranks = bytearray(_NUM_REGISTERS)
        self._change_probability = 1.0

    def add(self, key: bytes) -> float:
        """Add a key; return for how many new keys it stands: 0.0 for a key added before."""
        bits = xxhash.xxh3_64_intdigest(key)
        register = bits % _NUM_REGISTERS
        rank = _MAX_RANK - (bits >> _INDEX_BITS).bit_length()
        before = self._ranks[register]
        if rank <= before:
            return 0.0
        num_keys = 1.0 / self._change_probability
        self._ranks[register] = rank
        self._change_probability -= (2.0**-before - 2.0**-rank) / _NUM_REGISTERS
        return num_keys
