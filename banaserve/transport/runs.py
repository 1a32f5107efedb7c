"""Scattered runs of a memory, packed into one piece and back."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from banaserve import _native
from banaserve.transport.memory import Memory

Runs = npt.NDArray[np.int64]


def copy_runs(
    target: Memory, source: Memory, target_offsets: Runs, source_offsets: Runs, run_bytes: int
) -> None:
    """Copy runs of equal length, without the GIL.

    Raises:
        ValueError: A run leaves its memory.
    """
    _native.copy_regions(
        target.address,
        source.address,
        target_offsets,
        source_offsets,
        run_bytes,
        target.num_bytes,
        source.num_bytes,
    )


def gather(target: Memory, source: Memory, offsets: Runs, run_bytes: int) -> None:
    """Copy runs at ``offsets`` of ``source`` one after the other into ``target``."""
    packed = np.arange(offsets.size, dtype=np.int64) * run_bytes
    copy_runs(target, source, packed, offsets, run_bytes)


def gather_checksummed(target: Memory, source: Memory, offsets: Runs, run_bytes: int) -> int:
    """``gather``; the XXH3-64 of what ``target`` then holds, even if ``source`` changes meanwhile.

    Raises:
        ValueError: A run leaves its memory.
    """
    packed = np.arange(offsets.size, dtype=np.int64) * run_bytes
    return _native.copy_regions_checksummed(
        target.address,
        source.address,
        packed,
        offsets,
        run_bytes,
        target.num_bytes,
        source.num_bytes,
    )


def scatter(target: Memory, offsets: Runs, source: Memory, run_bytes: int) -> None:
    """Copy runs that lie one after the other in ``source`` to ``offsets`` of ``target``."""
    packed = np.arange(offsets.size, dtype=np.int64) * run_bytes
    copy_runs(target, source, offsets, packed, run_bytes)
