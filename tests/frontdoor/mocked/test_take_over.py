"""A server with mock engines is replaced while clients ask it, and refuses what cannot replace it.

With real engines ``live/test_take_over.py`` shows that no client notices.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from mock_facts import MockOptions
from mock_run import MockRun
from observing import until
from take_over_clients import replaced_unnoticed, serves

OPTIONS = ("--pd", "1:1", "--max-model-len", "2048", "--migration", "off", "--drain-timeout", "120")
MOCKS = MockOptions(step_ms=4.0)
ENDLESS_START = MockOptions(start_ms=600_000.0)


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk")


def on(folder: Path) -> tuple[str, ...]:
    return ("--kv-store-ssd", str(folder), "--kv-store-ssd-size", "1GiB")


@pytest.fixture(scope="module")
def old(serve: Callable[..., MockRun], disk: Path) -> MockRun:
    return serve(*OPTIONS, *on(disk / "old"), mocks=MOCKS)


@pytest.fixture(scope="module")
def claim(launch: Callable[..., MockRun], old: MockRun) -> Callable[..., MockRun]:
    """Starts a server that is to replace the old one, and returns at once."""

    def start(*options: str, port: int = old.port, mocks: MockOptions = MOCKS) -> MockRun:
        taking = ("--take-over", str(old.run_dir))
        return launch(*OPTIONS, *taking, *options, port=port, mocks=mocks)

    return start


def refused(run: MockRun) -> str:
    """The line with which it ends."""
    until(lambda: run.process.poll() is not None, "it has ended")
    errors = run.errors.read_text()
    assert run.process.returncode == 2, errors
    assert errors.startswith("banaserve: "), errors
    assert errors.count("\n") == 1, errors
    run.check_nothing_left()
    return errors


@pytest.mark.room
def test_what_cannot_be_taken_over_is_refused_at_once(
    launch: Callable[..., MockRun],
    claim: Callable[..., MockRun],
    old: MockRun,
    free_port: Callable[[], int],
    tmp_path: Path,
) -> None:
    nothing = refused(launch(*OPTIONS, "--take-over", str(tmp_path), port=old.port))
    assert f"no banaserve of yours serves in {tmp_path}" in nothing
    elsewhere = refused(claim(port=free_port()))
    assert f"listens on 127.0.0.1:{old.port} and not on 127.0.0.1:" in elsewhere
    assert "listens there or choose another --port" in refused(launch(*OPTIONS, port=old.port))
    same_folder = refused(claim("--run-dir", str(old.run_dir)))
    assert "in use by another banaserve: choose another" in same_folder
    assert serves(old)


@pytest.mark.room
def test_one_that_cannot_serve_or_dies_leaves_the_old_one_as_it_was(
    claim: Callable[..., MockRun], old: MockRun, disk: Path
) -> None:
    """A folder of the store is one server's own."""
    message = refused(claim(*on(disk / "old")))
    assert "no server is replaced by one going on without the store's ssd tier" in message
    assert f"{disk}/old is in use by another store" in message
    killed = claim(mocks=ENDLESS_START)
    killed.wait_for("starting instances")
    second = refused(claim())
    assert f"process {killed.process.pid} is taking it over: wait for its end" in second
    os.kill(killed.process.pid, signal.SIGKILL)
    until(killed.is_gone, "all of it has ended")
    assert serves(old)


@pytest.mark.deep
def test_no_client_notices_that_the_server_is_replaced(
    claim: Callable[..., MockRun], old: MockRun, disk: Path
) -> None:
    replaced_unnoticed(old, lambda: claim(*on(disk / "new")))
