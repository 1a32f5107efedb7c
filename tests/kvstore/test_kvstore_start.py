"""Starting and stopping the store: what a user can get wrong is one line and exit code 2."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from banaserve.cli import kvstore
from banaserve.cli.main import main
from banaserve.kvstore.client.admin import fetch_stats
from banaserve.kvstore.daemon import process as daemon_process
from banaserve.kvstore.daemon.options import DaemonOptions
from banaserve.kvstore.daemon.server import StoreServer
from banaserve.kvstore.pool import SlotPool
from forked import Forked
from store_process import fork_store, start_store
from waiting import eventually

DEADLINE_S = 60.0
SIZE = "64KiB"

Store = Forked | subprocess.Popen[bytes]


@contextmanager
def running(path: Path, start: Callable[[Path, str], Store] = fork_store) -> Iterator[Store]:
    process = start(path, SIZE)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that the daemon's command line says before it gives up."""
    assert daemon_process.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    ("path", "size", "expected"),
    [
        ("missing/store.sock", SIZE, "does not exist"),
        ("x" * 120, SIZE, "at most 107"),
        ("file", SIZE, "is not a socket"),
        ("file/store.sock", SIZE, "cannot listen"),
        ("store.sock", "900TiB", "does not fit"),
        ("store.sock", "12", "too small"),
        ("store.sock", "much", "is not a size"),
    ],
)
def test_mistakes_at_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], path: str, size: str, expected: str
) -> None:
    (tmp_path / "file").touch()
    line = complaint(capsys, "--socket", str(tmp_path / path), "--size", size)
    assert expected in line
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_pool_beyond_the_size_of_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with ``ulimit -f``: the pool is a file, though it has no name."""

    def refuse(fd: int, num_bytes: int) -> None:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    monkeypatch.setattr(os, "ftruncate", refuse)
    line = complaint(capsys, "--socket", str(tmp_path / "store.sock"), "--size", SIZE)
    assert "File too large" in line


def test_a_ready_fd_that_nobody_opened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "store.sock")
    old = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        line = complaint(capsys, "--socket", path, "--size", SIZE, "--ready-fd", "777")
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in old.items():
            signal.signal(number, handler)
    assert "--ready-fd 777" in line


def test_a_second_store_on_the_same_socket(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "store.sock"
    with running(path):
        assert "another process listens" in complaint(capsys, "--socket", str(path), "--size", SIZE)
        assert fetch_stats(path, DEADLINE_S).capacity_bytes == 64 * 1024


def test_a_folder_that_somebody_keeps_locked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("banaserve.kvstore.daemon.connections.listener.LOCK_WAIT_S", 0.05)
    folder = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_SH)
    line = complaint(capsys, "--socket", str(tmp_path / "store.sock"), "--size", SIZE)
    assert "choose a socket in another folder" in line
    os.close(folder)


def test_nobody_waits_for_a_store_that_fills_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "store.sock"
    with running(path):
        pass
    assert path.exists()

    def fill(num_bytes: int) -> SlotPool:
        assert not path.exists(), "who connects would wait for an answer"
        return SlotPool(num_bytes)

    monkeypatch.setattr("banaserve.kvstore.daemon.server.SlotPool", fill)
    server = StoreServer(DaemonOptions(size="64KiB", socket_path=path))
    assert path.exists()
    server.close()


def test_a_metrics_port_in_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        path = str(tmp_path / "store.sock")
        line = complaint(capsys, "--socket", path, "--size", SIZE, "--metrics-port", port)
    assert f"port {port}" in line


def test_the_socket_of_a_dead_store_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "store.sock"
    with running(path):
        pass
    assert path.exists()
    with running(path):
        assert fetch_stats(path, DEADLINE_S).capacity_bytes == 64 * 1024


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly(tmp_path: Path, number: signal.Signals) -> None:
    path = tmp_path / "store.sock"
    with running(path, start_store) as process:
        process.send_signal(number)
        assert process.wait(DEADLINE_S) == 0
        assert not path.exists()


def test_it_leaves_the_socket_of_a_successor_alone(tmp_path: Path) -> None:
    path = tmp_path / "store.sock"
    with running(path) as first:
        path.unlink()
        with running(path):
            first.terminate()
            assert first.wait(DEADLINE_S) == 0
            assert fetch_stats(path, DEADLINE_S).clients == 0


def test_it_stops_with_the_process_that_started_it(tmp_path: Path) -> None:
    path = tmp_path / "store.sock"
    readable, writable = os.pipe()
    arguments = [sys.executable, "-m", "banaserve.kvstore.daemon", "--socket", str(path)]
    arguments += ["--size", SIZE, "--die-with-parent", "--ready-fd", str(writable)]
    program = f"""
import os, subprocess
subprocess.Popen({arguments!r}, pass_fds=[{writable}])
os.close({writable})
os.read({readable}, 10)
"""
    subprocess.run(
        [sys.executable, "-c", program],
        pass_fds=[readable, writable],
        check=True,
        timeout=DEADLINE_S,
    )
    os.close(writable)
    os.close(readable)
    eventually(lambda: not path.exists())


def test_status_and_clear(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "store.sock"
    with running(path):
        assert main(["kvstore", "status", "--socket", str(path)]) == 0
        assert "0 B of 64 KiB used" in capsys.readouterr().out
        main(["kvstore", "status", "--socket", str(path), "--json"])
        assert json.loads(capsys.readouterr().out)["capacity_bytes"] == 64 * 1024
        assert main(["kvstore", "clear", "--socket", str(path)]) == 0
        assert "dropped 0 blocks" in capsys.readouterr().out
        monkeypatch.setattr(kvstore, "still_held", lambda _: ["2 slots of memory are in use"])
        assert main(["kvstore", "clear", "--socket", str(path)]) == 1
        assert "not empty: 2 slots" in capsys.readouterr().out


@pytest.mark.parametrize("verb", ["status", "clear"])
def test_no_store_there(tmp_path: Path, verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kvstore", verb, "--socket", str(tmp_path / "store.sock")]) == 2
    assert "no KV cache store" in capsys.readouterr().err
