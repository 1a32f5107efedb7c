"""What the daemon shares with Mooncake's process."""

from __future__ import annotations

import os
import subprocess
from typing import Any

import numpy as np
import pytest

from banaserve.base.access.key_files import PEER_KEY_VARIABLE
from banaserve.kvstore.fingerprint import PAGE_BYTES
from banaserve_mooncake.child import MooncakeChild, Staging
from banaserve_mooncake.config import parse_url

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


def test_no_key_is_handed_over_and_no_password_is_on_the_command_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever reaches Mooncake's port can read the memory of its process, and so its variables."""
    started: dict[str, Any] = {}

    def popen(command: list[str], *, env: dict[str, str], **others: Any) -> None:
        started.update(command=command, env=env)
        raise OSError("no process")

    monkeypatch.setattr(subprocess, "Popen", popen)
    for name in (PEER_KEY_VARIABLE, "VLLM_API_KEY", "HF_TOKEN"):
        monkeypatch.setenv(name, "dear" * 4)
    monkeypatch.setenv("MC_GID_INDEX", "3")
    with pytest.raises(OSError, match="no process"):
        MooncakeChild(parse_url("mooncake://here:1?metadata=redis://:secret@there"), -1)
    assert not {PEER_KEY_VARIABLE, "VLLM_API_KEY", "HF_TOKEN"} & started["env"].keys()
    assert started["env"]["MC_GID_INDEX"] == "3"
    assert started["env"]["PATH"] == os.environ["PATH"]
    assert not any("secret" in word for word in started["command"])
