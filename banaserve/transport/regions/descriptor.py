"""Descriptor by which a peer opens a region, and the offsets of runs in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

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
