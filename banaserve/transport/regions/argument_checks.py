"""Checks of the arguments of regions and transfers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from banaserve.transport.errors import RefusedError
from banaserve.transport.memory import Memory, Plan
from banaserve.transport.regions.descriptor import (
    MAX_EPOCH,
    MAX_REGION_BYTES,
    Offsets,
    RegionDescriptor,
)


def make_plan(
    region: RegionDescriptor,
    local: Memory,
    local_offsets: Offsets,
    remote_offsets: Offsets,
    num_bytes: int,
    epoch: int,
    *,
    writes: bool,
) -> Plan:
    """Return a plan whose runs are within ``local`` and ``region``.

    Raises:
        RefusedError: A run is out of bounds, the numbers of offsets differ, or ``local`` is
            read-only and would be written to.
    """
    if not writes and not local.writable:
        raise RefusedError("cannot read into memory that is read-only")
    if not 0 <= num_bytes <= MAX_REGION_BYTES or not 0 <= epoch <= MAX_EPOCH:
        raise RefusedError(f"no run has {num_bytes} bytes, or no epoch is {epoch}")
    own = check_offsets(local_offsets, num_bytes, local.num_bytes, "the local memory")
    other = check_offsets(remote_offsets, num_bytes, region.num_bytes, "the region")
    if own.size != other.size:
        raise RefusedError(f"{own.size} local offsets do not pair up with {other.size} remote ones")
    return Plan(local, own, other, num_bytes, epoch, writes)


def check_offsets(
    offsets: Offsets, num_bytes: int, size_bytes: int, where: str
) -> npt.NDArray[np.int64]:
    """Return a copy of ``offsets`` as ``[num_runs]`` int64.

    Raises:
        RefusedError: A run of ``num_bytes`` at an offset exceeds ``size_bytes``, or the offsets are
            not integers of one dimension.
    """
    try:
        array = np.array(offsets)
        if array.size and array.dtype.kind not in "iu":
            raise TypeError("an offset is no integer")
        own = array.astype(np.int64).ravel()
    except (TypeError, ValueError, OverflowError) as error:
        raise RefusedError(f"offsets into {where} are no integers: {error}") from None
    if array.ndim != 1:
        raise RefusedError(f"offsets into {where} have {array.ndim} dimensions instead of one")
    if own.size and (own.min() < 0 or own.max() > size_bytes - num_bytes):
        bad = int(own[(own < 0) | (own > size_bytes - num_bytes)][0])
        raise RefusedError(f"{num_bytes} bytes at {bad} lie outside {where} of {size_bytes} bytes")
    return own


def check_range(first_byte: int, num_bytes: int, size_bytes: int) -> None:
    """Check that a range is within a region.

    Raises:
        RefusedError: The range is out of bounds.
    """
    if first_byte < 0 or num_bytes < 0 or first_byte > size_bytes - num_bytes:
        raise RefusedError(
            f"{num_bytes} bytes at {first_byte} lie outside the region of {size_bytes} bytes"
        )


def check_offer(num_bytes: int, epoch: int) -> None:
    """Check the size and the epoch of a new region.

    Raises:
        RefusedError: The size or the epoch is out of range.
    """
    if not 1 <= num_bytes <= MAX_REGION_BYTES:
        raise RefusedError(f"a region of {num_bytes} bytes is not possible")
    if not 0 <= epoch <= MAX_EPOCH:
        raise RefusedError(f"an epoch of {epoch} is not possible")
