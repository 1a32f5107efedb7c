"""Logs that stay within a size while others write them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from banaserve.frontdoor import log_rotation
from banaserve.frontdoor.log_rotation import rotate, rotate_all, rotating
from banaserve.mains.engine import redirect_output
from waiting import eventually, until


def test_a_long_log_is_cut_and_what_it_held_is_kept(tmp_path: Path) -> None:
    log = tmp_path / "d0.log"
    log.write_bytes(b"12345678")
    assert not rotate(log, 8)
    assert rotate(log, 7)
    assert (log.read_bytes(), (tmp_path / "d0.log.1").read_bytes()) == (b"", b"12345678")
    assert (tmp_path / "d0.log.1").stat().st_mode & 0o777 == 0o600
    log.write_bytes(b"other words")
    assert rotate(log, 7)
    assert (tmp_path / "d0.log.1").read_bytes() == b"other words"


def test_a_process_writes_on_at_the_beginning_of_its_log(tmp_path: Path) -> None:
    """As an engine does, whose libraries write through the same descriptors."""
    log = tmp_path / "d0.log"
    readable, writable = os.pipe()
    engine = os.fork()
    if engine == 0:
        redirect_output(str(log))
        os.write(1, b"first\n")
        os.read(readable, 1)
        subprocess.run([sys.executable, "-c", "print('second')"], check=False)
        os._exit(0)
    eventually(lambda: log.exists() and log.read_bytes() == b"first\n")
    assert rotate(log, 1)
    os.write(writable, b"x")
    os.waitpid(engine, 0)
    os.close(readable)
    os.close(writable)
    assert log.read_bytes() == b"second\n", "no hole of zeros before it"


def test_a_log_that_cannot_be_copied_is_cut_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(log_rotation.shutil, "copyfileobj", full)
    log = tmp_path / "d0.log"
    log.write_bytes(b"12345678")
    assert rotate(log, 7)
    assert log.read_bytes() == b""
    assert not (tmp_path / "d0.log.1").exists()
    assert "No space left" in caplog.text


def test_one_log_that_cannot_be_cut_keeps_none_of_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.log").symlink_to(tmp_path / "nowhere")
    for name in ("b.log", "c.txt"):
        (tmp_path / name).write_bytes(b"12345678")
    rotate_all(tmp_path, 1)
    assert "a.log" in caplog.text
    assert ((tmp_path / "b.log").read_bytes(), (tmp_path / "c.txt").read_bytes()) == (
        b"",
        b"12345678",
    )


async def test_logs_are_rotated_while_a_server_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_rotation, "_INTERVAL_S", 0.001)
    log = tmp_path / "d0.log"
    async with rotating(tmp_path, 10):
        for _ in range(2):
            log.write_bytes(b"x" * 11)
            await until(lambda: log.stat().st_size == 0)


async def test_no_log_is_rotated_where_no_size_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_rotation, "_INTERVAL_S", 0.001)
    log, other = tmp_path / "kept" / "d0.log", tmp_path / "cut" / "d0.log"
    for one in (log, other):
        one.parent.mkdir()
        one.write_bytes(b"x" * 11)
    async with rotating(log.parent, 0), rotating(other.parent, 10):
        await until(lambda: other.stat().st_size == 0)
        other.write_bytes(b"x" * 11)
        await until(lambda: other.stat().st_size == 0)
    assert log.stat().st_size == 11
