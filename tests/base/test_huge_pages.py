"""What an engine on a CPU puts into huge pages, and that it is there."""

from __future__ import annotations

import mmap
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from banaserve.base.platform.huge_pages import (
    PAGE_BYTES,
    VARIABLE,
    are_offered,
    gather,
    private_spans,
    worth_gathering,
)

MIB = 1 << 20
GATHERS = """
import os, re
from pathlib import Path
from banaserve.base.platform.huge_pages import gather

def huge_bytes():
    shown = Path("/proc/self/smaps_rollup").read_text()
    return int(re.search(r"AnonHugePages: +(\\d+)", shown)[1]) << 10

part = os.urandom(1 << 20)
ours = bytearray(part) * 64
before = huge_bytes()
asked = gather()
assert ours == part * 64
print(before, asked, huge_bytes())
"""
"""A program that prints huge pages before and after, and what was asked; it has 64 MiB."""

MAPS = """\
55d0e0000000-55d0e4000000 rw-p 00000000 00:00 0                          [heap]
7f00001ff000-7f0000601000 rw-p 00000000 00:00 0
7f1000000000-7f1004000000 rw-p 00000000 00:01 77                         /memfd:pool (deleted)
7f2000001000-7f20003ff000 rw-p 00000000 00:00 0
7f3000000000-7f3004000000 r--p 00000000 00:00 0
7f4000000000-7f4004000000 rw-s 00000000 00:00 0
"""
SMALL_EACH = PAGE_BYTES // mmap.PAGESIZE
OWN, SHARED, ABSENT = 1 << 63 | 1 << 56 | 7, 1 << 63 | 7, 0


@pytest.mark.parametrize(
    ("setting", "is_offered"),
    [
        ("always [madvise] never", True),
        ("[always] madvise never", True),
        ("always madvise [never]", False),
        (None, False),
    ],
)
def test_whether_a_system_has_them(setting: str | None, is_offered: bool, tmp_path: Path) -> None:
    if setting is not None:
        (tmp_path / "enabled").write_text(setting)
    assert are_offered(tmp_path / "enabled") == is_offered


def test_only_private_memory_of_no_file_that_can_be_written_counts() -> None:
    found = list(private_spans(MAPS.splitlines()))
    assert found == [(0x55D0E0000000, 0x55D0E4000000), (0x7F0000200000, 0x7F0000600000)]


def huge(*small: tuple[int, int]) -> list[int]:
    """Pages of a huge one: how many of which kind."""
    pages = [kind for count, kind in small for _ in range(count)]
    assert len(pages) == SMALL_EACH
    return pages


def test_a_huge_page_is_gathered_where_nearly_all_of_it_is_ours() -> None:
    few = SMALL_EACH // 20
    rest = SMALL_EACH - few
    pages = [
        *huge((SMALL_EACH, OWN)),
        *huge((rest, OWN), (few, ABSENT)),
        *huge((few, OWN), (rest, ABSENT)),  # a thread's stack
        *huge((few, OWN), (rest, SHARED)),  # what a fork has not written
        *huge((few, SHARED), (rest, OWN)),
    ]
    found = list(worth_gathering(4 * PAGE_BYTES, np.array(pages, np.uint64)))
    assert found == [(4 * PAGE_BYTES, 6 * PAGE_BYTES), (8 * PAGE_BYTES, 9 * PAGE_BYTES)]


def test_who_says_no_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "enabled").write_text("always madvise [never]")
    assert gather(tmp_path / "enabled") == 0
    (tmp_path / "enabled").write_text("[always] madvise never")
    monkeypatch.setenv(VARIABLE, "0")
    assert gather(tmp_path / "enabled") == 0


@pytest.mark.skipif(not are_offered(), reason="this system has no huge pages to give")
def test_memory_lies_in_them_afterwards_with_what_was_in_it() -> None:
    shown = subprocess.check_output([sys.executable, "-c", GATHERS], text=True)
    before, asked, after = map(int, shown.split())
    assert before == 0
    assert 62 * MIB <= asked <= 120 * MIB
    assert after >= 62 * MIB
