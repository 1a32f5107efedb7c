"""The memory that the daemon shares with Mooncake's process."""

from __future__ import annotations

import os

import numpy as np
import pytest

from banaserve.kvstore.fingerprint import PAGE_BYTES
from banaserve_mooncake.child import Staging

KEY = b"k" * 32


def test_a_block_comes_back_and_one_that_changed_does_not() -> None:
    staging = Staging(2, PAGE_BYTES)
    block = np.arange(PAGE_BYTES, dtype=np.uint8)
    slot = staging.take()
    staging.fill(slot, KEY, block)
    target = np.zeros_like(block)
    assert staging.copy_out(slot, KEY, target)
    assert np.array_equal(target, block)
    assert not staging.copy_out(slot, b"o" * 32, target), "another's name"
    os.pwrite(staging.fd, b"\xff", staging.first_byte(slot) + 7)
    assert not staging.copy_out(slot, KEY, target)
    staging.close()


@pytest.mark.parametrize("num_bytes", [0, 2**20])
def test_the_other_side_cannot_take_the_memory_away(num_bytes: int) -> None:
    staging = Staging(2, PAGE_BYTES)
    with pytest.raises(PermissionError):
        os.ftruncate(staging.fd, num_bytes)
    staging.close()
