"""Fixtures that start ``banaserve serve`` as a user does, and check what it leaves behind."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

import ports
import small_model
from banaserve.base.platform.linux import available_memory_bytes
from fork_server import ForkServer
from observing import until
from server_run import Run

MODEL = "smollm2-135m"
# What these tests need: a small machine has room for it beside other work.
LIGHT = ("--kv-store-size", "512MiB", "--kv-cache-memory-bytes", str(512 << 20))


START_BYTES = 6 << 30
"""Memory that a server of a few small engines may take."""
MEMORY_DEADLINE_S = 120.0


def _await_memory() -> None:
    """Wait for servers of other tests, which may be about to end: without room, a server refuses.

    Where memory stays scarce, the server says so.
    """
    with contextlib.suppress(AssertionError):
        until(lambda: available_memory_bytes() >= START_BYTES, "room", MEMORY_DEADLINE_S)


@pytest.fixture(scope="session")
def free_port() -> Callable[[], int]:
    return ports.free_port


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """One for all processes that run tests of this session."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    server = ForkServer(folder / "forks")
    yield server
    server.close()


@pytest.fixture(scope="module")
def launch(
    tmp_path_factory: pytest.TempPathFactory,
    free_port: Callable[[], int],
    request: pytest.FixtureRequest,
) -> Iterator[Callable[..., Run]]:
    """``launch(*options, port=, env=, fresh=)`` starts a run and returns at once.

    With ``fresh``, or with variables of its own but PYTHONPATH, it is a Python of its own: a user's
    start from the first import on. Other runs are forked where the imports are done already.
    """
    with contextlib.ExitStack() as stack:

        def start(
            *options: str,
            port: int | None = None,
            env: Mapping[str, str] = {},
            fresh: bool = False,
        ) -> Run:
            folder = tmp_path_factory.mktemp("serve")
            is_fresh = fresh or not env.keys() <= {"PYTHONPATH"}
            _await_memory()
            forks = None if is_fresh else request.getfixturevalue("fork_server")
            run = Run(folder, port or free_port(), options, env, forks)
            stack.callback(run.close)
            return run

        yield start


@pytest.fixture(scope="module")
def serve(launch: Callable[..., Run]) -> Callable[..., Run]:
    """``serve(*options, port=, env=, fresh=)`` starts a small server; returns when it serves.

    Without a model it is the small one, which has SmolLM2's name.
    """

    def start(*options: str, **how: object) -> Run:
        if "--pace" not in options:
            model = () if "--model" in options else small_model.options()
            options = (*model, *LIGHT, *options)
        run = launch(*options, **how)
        run.wait_for("Ctrl-C ends it.")
        return run

    return start


@pytest.fixture(scope="module")
def server(serve: Callable[..., Run], request: pytest.FixtureRequest) -> Iterator[Run]:
    """One server for a module: SERVE_OPTIONS says how it starts, END_SIGNAL how it ends."""
    run = serve(*getattr(request.module, "SERVE_OPTIONS", ()))
    yield run
    assert run.end(getattr(request.module, "END_SIGNAL", signal.SIGTERM)) == 0


@pytest.fixture(scope="module")
def points(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which fail points are armed."""
    return tmp_path_factory.mktemp("points")


@pytest.fixture
def disarmed(points: Path) -> Iterator[None]:
    """What one test has not come by fails in no other."""
    yield
    for left in points.iterdir():
        left.unlink(missing_ok=True)


@pytest.fixture(scope="session")
def poll() -> Callable[..., float]:
    """``poll(holds, what, deadline_s)``."""
    return until


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Show what a server wrote beside the failure of a test that used it."""
    report = yield
    if report.failed:
        for run in getattr(item, "funcargs", {}).values():
            if isinstance(run, Run):
                report.sections.append((f"server at {run.url}", run.tails()))
    return report
