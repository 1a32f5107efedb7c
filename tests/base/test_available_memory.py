"""Memory within a control group's limit, from files as the kernel writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from banaserve.base.platform import linux

MIB = 1 << 20


@pytest.fixture
def group(tmp_path: Path) -> Path:
    """500 MiB, of which 400 are used: 50 by processes, 30 in /dev/shm, the rest by files read."""
    (tmp_path / "memory.max").write_text(f"{500 * MIB}\n")
    (tmp_path / "memory.current").write_text(f"{400 * MIB}\n")
    entries = {
        "anon": 50 * MIB,
        "file": 340 * MIB,
        "shmem": 30 * MIB,
        "inactive_file": 110 * MIB,
        "active_file": 200 * MIB,
        "slab_reclaimable": 10 * MIB,
    }
    text = "".join(f"{name} {num_bytes}\n" for name, num_bytes in entries.items())
    (tmp_path / "memory.stat").write_text(text)
    return tmp_path


@pytest.fixture(autouse=True)
def large_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linux, "_meminfo_bytes", lambda name: 64 << 30)


def test_files_that_were_read_count_as_available(group: Path) -> None:
    assert linux.available_memory_bytes(group) == (500 - 400 + 110 + 200 + 10) * MIB


def test_a_group_without_a_limit_has_what_the_machine_has(group: Path) -> None:
    (group / "memory.max").write_text("max\n")
    assert linux.available_memory_bytes(group) == 64 << 30


def test_a_machine_without_such_groups_has_what_it_has(tmp_path: Path) -> None:
    assert linux.available_memory_bytes(tmp_path) == 64 << 30


def test_a_limit_larger_than_the_machine_adds_nothing(group: Path) -> None:
    (group / "memory.max").write_text(str(128 << 30))
    assert linux.available_memory_bytes(group) == 64 << 30
