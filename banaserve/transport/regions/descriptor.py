"""Descriptor by which a peer opens a region, and checks of what is copied to and from a region."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from banaserve.transport.errors import RefusedError
from banaserve.transport.memory import Memory, Plan

Offsets = npt.NDArray[np.int64] | Sequence[int]
MAX_REGION_BYTES = 2**48
MAX_EPOCH = 2**62


class RegionDescriptor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Description by which a peer opens a region; contains no secret.

    Attributes:
        transport: Name of the transport that offers the region.
        region_id: Id of the offer, 16 random bytes; a new offer of the same memory has another id.
        num_bytes: Size of the region.
        epoch: Epoch at the time of the offer.
        address: Address at which the offering side answers, in the transport's own form.
    """

    transport: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    region_id: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    num_bytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_REGION_BYTES)]
    epoch: Annotated[int, msgspec.Meta(ge=0, le=MAX_EPOCH)]
    address: Annotated[str, msgspec.Meta(min_length=1, max_length=512)]


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
    """Check that a range is within a region; raise RefusedError if it is not."""
    if first_byte < 0 or num_bytes < 0 or first_byte > size_bytes - num_bytes:
        raise RefusedError(
            f"{num_bytes} bytes at {first_byte} lie outside the region of {size_bytes} bytes"
        )


def check_offer(num_bytes: int, epoch: int) -> None:
    """Check the size and the epoch of a new region; raise RefusedError if one is out of range."""
    if not 1 <= num_bytes <= MAX_REGION_BYTES:
        raise RefusedError(f"a region of {num_bytes} bytes is not possible")
    if not 0 <= epoch <= MAX_EPOCH:
        raise RefusedError(f"an epoch of {epoch} is not possible")
