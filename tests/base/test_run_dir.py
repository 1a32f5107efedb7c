"""Folders of runs that begin at one time."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from banaserve.base.platform.run_dir import RunDir, open_run_dir

_NUM_RUNS = 16


def test_runs_that_begin_at_once_have_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In containers with a shared home and shared temporary files they have the same process id."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    begin, end = threading.Barrier(_NUM_RUNS), threading.Barrier(_NUM_RUNS)

    def run() -> tuple[RunDir, bool]:
        with contextlib.ExitStack() as stack:
            begin.wait(60)
            own = stack.enter_context(open_run_dir(None))
            end.wait(60)
            return own, own.sockets.is_dir() and own.logs.is_dir()

    with ThreadPoolExecutor(_NUM_RUNS) as pool:
        runs = list(pool.map(lambda _: run(), range(_NUM_RUNS)))
    assert all(there for _, there in runs)
    assert len({own.logs for own, _ in runs}) == _NUM_RUNS
    assert not any(own.sockets.exists() for own, _ in runs)
