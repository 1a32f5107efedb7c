"""Fuzzes the boundaries of banaserve._native against plain models: ``fuzz.py [ROUNDS] [SEED]``.

Meant for a build with sanitizers: every array is of the exact size that native code is told, so
that a byte too many is seen. The same rounds and seed do the same.
"""

from __future__ import annotations

import random
import sys

import numpy as np
import xxhash

from banaserve import _native

SIZES = (0, 1, 2, 15, 16, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 4095, 4097, 8191)
SIZES += (8192, 8193, 16384, 20_001)
KINDS = (None, "", *_native.copy_instructions())
FAR = (2**63 - 1, 2**62, -1, -(2**63))


def fuzz_copies(draws: random.Random) -> None:
    """Valid copies against numpy, and offsets that must be refused before a byte has moved."""
    num_bytes, count = draws.choice(SIZES), draws.randint(0, 6)
    source = np.frombuffer(draws.randbytes(num_bytes + draws.randint(0, 130)), np.uint8).copy()
    target = np.frombuffer(draws.randbytes(num_bytes + draws.randint(0, 130)), np.uint8).copy()
    if draws.random() < 0.3:
        source = target  # overlaps are possible
    offsets = [
        [draws.randint(0, array.size - num_bytes) for _ in range(count)]
        for array in (target, source)
    ]
    if count and draws.random() < 0.3:
        side, at = draws.randint(0, 1), draws.randrange(count)
        limit = (target, source)[side].size - num_bytes
        offsets[side][at] = draws.choice((*FAR, limit + 1, limit + 64))
    expected = model_of_copies(target, source, offsets, num_bytes)
    before = target.copy()
    kind, sums = draws.choice(KINDS), draws.random() < 0.5
    function = _native.copy_regions_checksummed if sums else _native.copy_regions
    try:
        value = function(
            target.ctypes.data, source.ctypes.data, *(np.array(o, np.int64) for o in offsets),
            num_bytes, target.size, source.size, kind is not None, kind or "",
        )  # fmt: skip
    except ValueError:
        assert expected is None, "refused what is fine"
        assert (target == before).all(), "refused after it had begun"
        return
    assert expected is not None, "took what leaves its memory or overlaps"
    bytes_after, moved = expected
    assert (target == bytes_after).all()
    assert not sums or value == xxhash.xxh3_64_intdigest(moved)


def model_of_copies(target, source, offsets, num_bytes):
    """``(target afterwards, bytes moved)``; None where the copies must be refused."""
    after, moved = target.copy(), []
    read_from = after if source is target else source
    if num_bytes:
        for to, of in zip(*offsets, strict=True):
            inside = 0 <= to <= target.size - num_bytes and 0 <= of <= source.size - num_bytes
            if not inside or (source is target and abs(to - of) < num_bytes):
                return None
            moved.append(read_from[of : of + num_bytes].tobytes())
            after[to : to + num_bytes] = np.frombuffer(moved[-1], np.uint8)
    return after, b"".join(moved)


def main(rounds: int = 20, seed: int = 0) -> None:
    """100 rounds of copies, ``rounds`` times."""
    for i in range(rounds):
        draws = random.Random(f"{seed}/{i}")
        try:
            for _ in range(100):
                fuzz_copies(draws)
        except AssertionError:
            print(f"failed in round {i} of seed {seed}", file=sys.stderr)
            raise
    print(f"fuzz: {rounds} rounds of seed {seed}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
