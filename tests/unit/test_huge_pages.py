"""Engines on a CPU ask for huge pages, where there are any, and nobody else's settings change."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from banaserve.engine.vllm.settings.environment import engine_environment
from banaserve.platform.huge_pages import (
    GLIBC_VARIABLE,
    MALLOC_TUNABLE,
    TORCH_VARIABLE,
    are_offered,
    with_huge_pages,
)

ASKED = {TORCH_VARIABLE: "1", GLIBC_VARIABLE: f"{MALLOC_TUNABLE}=1"}
SHOWS_PAGES = """
import sys, numpy, torch
one = {"numpy": lambda: numpy.ones(1 << 23), "torch": lambda: torch.ones(1 << 24)}[sys.argv[1]]()
for line in open("/proc/self/smaps_rollup"):
    if line.startswith("AnonHugePages"):
        print(int(line.split()[1]) << 10)
"""
ALLOCATED_BYTES = 64 << 20


@pytest.mark.parametrize("setting", ["always [madvise] never", "[always] madvise never"])
def test_a_system_that_offers_them(setting: str, tmp_path: Path) -> None:
    (tmp_path / "enabled").write_text(setting)
    assert are_offered(tmp_path / "enabled")


def test_a_system_that_does_not(tmp_path: Path) -> None:
    assert not are_offered(tmp_path / "missing")
    (tmp_path / "enabled").write_text("always madvise [never]")
    assert not are_offered(tmp_path / "enabled")


def test_what_is_asked_and_what_the_user_says_of_it() -> None:
    assert with_huge_pages({"A": "b"}) == {"A": "b", **ASKED}
    others = {GLIBC_VARIABLE: "glibc.malloc.arena_max=2"}
    joined = f"glibc.malloc.arena_max=2:{MALLOC_TUNABLE}=1"
    assert with_huge_pages(others)[GLIBC_VARIABLE] == joined
    without = {TORCH_VARIABLE: "0", GLIBC_VARIABLE: f"{MALLOC_TUNABLE}=0"}
    assert with_huge_pages(without) == without


def test_engines_on_gpus_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TORCH_VARIABLE, raising=False)
    monkeypatch.delenv(GLIBC_VARIABLE, raising=False)
    of_gpu = engine_environment("2,3")
    assert of_gpu["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert not ASKED.keys() & of_gpu.keys()
    assert (engine_environment(None).items() >= ASKED.items()) == are_offered()


@pytest.mark.skipif(not are_offered(), reason="this system has no huge pages to give")
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_an_engines_memory_lies_in_them(library: str) -> None:
    command = [sys.executable, "-c", SHOWS_PAGES, library]
    shown = subprocess.check_output(command, env=engine_environment(None), text=True)
    assert int(shown) > ALLOCATED_BYTES / 2
