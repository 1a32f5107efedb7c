"""Runs of ``banaserve serve`` with mock engines: they serve a second after the fork server."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

import small_model
from banaserve_bench.loadgen import servers
from fork_server import ForkedProcess, ForkServer
from mock_facts import VARIABLE, MockOptions
from node_run import NodeRun
from server_run import Run

FOLDER = Path(__file__).parent
_PROGRAM = str(FOLDER / "mock_serve.py")
# Mock cores keep no KV: the store's daemon is there for what happens to it.
SMALL = ("--kv-store-size", "16MiB", "--kv-cache-memory-bytes", str(512 << 20))


class MockRun(Run):
    """A run of ``banaserve serve`` with mock engines.

    Args:
        mocks: Times, limits and troubles of its cores.
        forks: Forks the server; None starts a Python of its own.
    """

    def __init__(
        self,
        folder: Path,
        port: int,
        options: tuple[str, ...],
        env: Mapping[str, str],
        forks: ForkServer | None,
        mocks: MockOptions,
    ) -> None:
        self._mocks = folder / "mocks.json"
        self.set_mocks(mocks)
        env = {**env, VARIABLE: str(self._mocks), "PYTHONPATH": _path(env)}
        scripts = None if forks is None else _Scripts(forks)
        super().__init__(folder, port, options, env, scripts, _as_script)  # type: ignore[arg-type]

    def set_mocks(self, mocks: MockOptions) -> None:
        """Change what cores read that start from now on; those that run stay as they are."""
        with tempfile.NamedTemporaryFile(dir=self._mocks.parent, delete=False) as made:
            made.write(msgspec.json.encode(mocks))
        os.replace(made.name, self._mocks)

    @property
    def cores(self) -> list[int]:
        """Process ids of its mock cores that live."""
        return [one.pid for one in self.processes() if one.ppid() in self._parents()]

    def _parents(self) -> set[int]:
        return {one.pid for one in self.processes() if "mock_parent" in one.cmdline()}


class _Scripts:
    """The fork server, for a script in place of the module ``banaserve``."""

    def __init__(self, forks: ForkServer) -> None:
        self._forks = forks

    def start(
        self, argv: Sequence[str], env: Mapping[str, str], stdout: int, stderr: int
    ) -> ForkedProcess:
        return self._forks.start([_PROGRAM, *argv[1:]], env, stdout, stderr)


def _as_script(command: Sequence[str]) -> list[str]:
    """``python -P -m banaserve ...`` as a call of the script."""
    return [sys.executable, "-P", _PROGRAM, *command[4:]]


def _path(env: Mapping[str, str]) -> str:
    given = env.get("PYTHONPATH", "")
    return os.pathsep.join([str(FOLDER), *([given] if given else [])])


def mock_node(
    folder: Path,
    address: str,
    key: str,
    mocks: MockOptions | None = None,
    forks: ForkServer | None = None,
    env: Mapping[str, str] | None = None,
) -> NodeRun:
    """Start ``banaserve node`` whose engines are mocks; returns at once.

    Args:
        folder: For its logs; there may be none yet.
        address: ``HOST:PORT``.
        forks: As the fixture ``fork_server``; None starts a Python of its own.
    """
    said = msgspec.json.encode(mocks or MockOptions()).decode()
    env = {**(env or {}), VARIABLE: said, "PYTHONPATH": _path(os.environ)}
    scripts = None if forks is None else _Scripts(forks)
    return NodeRun(folder, address, key, _as_script, env, scripts)


def started_elsewhere(mocks: MockOptions) -> dict[str, str]:
    """Variables with which an agent has mock engines that Ray, or another program, starts."""
    path = os.pathsep.join((str(FOLDER / "startup"), _path(os.environ)))
    return {"PYTHONPATH": path, VARIABLE: msgspec.json.encode(mocks).decode()}


def mock_run(
    folder: Path,
    forks: ForkServer | None,
    *options: str,
    mocks: MockOptions | None = None,
    port: int | None = None,
    env: Mapping[str, str] | None = None,
) -> MockRun:
    """Start a server with mock engines; returns at once, ``wait_for("Ctrl-C ends it.")`` waits.

    Args:
        folder: For its logs.
        forks: As the fixture ``fork_server``.
        options: Options of ``banaserve serve``; without a model the small one is served, by one
            prefill and one decode instance.
    """
    model = () if "--model" in options else small_model.options()
    where = port or servers.free_port()
    words = (*model, *SMALL, *options)
    return MockRun(folder, where, words, env or {}, forks, mocks or MockOptions())


def mock_launching(
    factory: pytest.TempPathFactory, forks: ForkServer
) -> Iterator[Callable[..., MockRun]]:
    """For a fixture that takes the place of ``launch``: the same calls start mock servers.

    A call may also give ``mocks``, and ``fresh`` is of no effect.
    """
    with contextlib.ExitStack() as stack:

        def launch(*options: str, fresh: bool = False, **how: Any) -> MockRun:
            run = mock_run(factory.mktemp("mock"), forks, *options, **how)
            stack.callback(run.close)
            return run

        yield launch


def mock_serving(launch: Callable[..., MockRun]) -> Callable[..., MockRun]:
    """For a fixture that takes the place of ``serve``: the same calls start mock servers.

    Args:
        launch: As ``mock_launching`` makes it.
    """

    def serve(*options: str, **how: Any) -> MockRun:
        run = launch(*options, **how)
        run.wait_for("Ctrl-C ends it.")
        return run

    return serve
