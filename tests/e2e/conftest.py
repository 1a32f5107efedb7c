"""Fixtures that start ``banaserve serve`` as a user does, and check what it leaves behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import httpx
import openai
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from banaserve.bench.loadgen import servers
from observing import until

MODEL = "smollm2-135m"
# What these tests need: a small machine has room for it beside other work.
LIGHT = ("--kv-store-size", "512MiB", "--kv-cache-memory-bytes", str(512 << 20))
START_DEADLINE_S = 240.0
END_DEADLINE_S = 10.0
DEADLINE_S = 60.0
_MARK = "BANASERVE_TEST_RUN"
_SHM = Path("/dev/shm")

Metrics = dict[str, dict[frozenset[tuple[str, str]], float]]


def parse_metrics(page: str) -> Metrics:
    """``{name: {labels: value}}`` of a page in Prometheus' text format."""
    found: Metrics = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            found.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
    return found


class Run:
    """One run of ``banaserve serve`` and all processes that belong to it."""

    def __init__(self, folder: Path, port: int, options: tuple[str, ...], env: Mapping[str, str]):
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.run_dir = folder / "run"
        self.errors = folder / "stderr"
        self._terminal = folder / "stdout"
        # Not below ``folder``: a socket's path has at most 107 characters.
        self.temp_dir = Path(tempfile.mkdtemp(prefix="bt-"))
        self._shm_before = set(_SHM.iterdir())
        self._mark = uuid.uuid4().hex
        self._seen: set[psutil.Process] = set()
        command = [sys.executable, "-P", "-m", "banaserve", "serve", "--port", str(port)]
        command += ["--run-dir", str(self.run_dir), *options]
        with self._terminal.open("wb") as out, self.errors.open("wb") as err:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**os.environ, **env, "TMPDIR": str(self.temp_dir), _MARK: self._mark},
                start_new_session=True,
            )

    # ---- life

    def wait_for(self, text: str) -> None:
        """Return when it has printed ``text``."""

        def printed() -> bool:
            ended = self.process.poll() is not None
            if text in self._terminal.read_text():
                return True
            assert not ended, f"ended with {self.process.returncode} before {text!r}"
            return False

        try:
            until(printed, f"{text!r} is printed", START_DEADLINE_S)
        except AssertionError as failure:
            raise AssertionError(f"{failure}\n{self.tails()}") from None

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal as a terminal does, to the process group; returns the exit code.

        Raises:
            AssertionError: Something is left after ten seconds.
        """
        self.processes()
        os.killpg(self.process.pid, number)
        until(self.is_gone, "every process of the server has ended", END_DEADLINE_S)
        self.check_nothing_left()
        return self.process.returncode

    def is_gone(self) -> bool:
        return self.process.poll() is not None and not self.processes()

    def processes(self) -> list[psutil.Process]:
        """What lives of its session, carries its mark, or was below it when last asked."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._seen.update(psutil.Process(self.process.pid).children(recursive=True))
        self._seen.update(process for process in psutil.process_iter() if self._owns(process))
        return [process for process in self._seen if _lives(process)]

    def _owns(self, process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error, OSError):
            return (
                os.getsid(process.pid) == self.process.pid
                or process.environ().get(_MARK) == self._mark
            )
        return False

    def check_nothing_left(self) -> None:
        """No socket or other file in its temporary folder, none in /dev/shm, no note of a run."""
        assert list(self.temp_dir.iterdir()) == []
        new = set(_SHM.iterdir()) - self._shm_before
        assert {path for path in new if not _is_in_use(path)} == set()
        assert not (self.run_dir / "run.json").exists()

    def close(self) -> None:
        """End it if it still runs, whatever a test has left it in."""
        try:
            if self.process.poll() is None:
                self.end()
        finally:
            for process in self.processes():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self.process.wait()
            shutil.rmtree(self.temp_dir, ignore_errors=True)

    def tails(self) -> str:
        """The last lines of everything it has written."""
        logs = [self._terminal, self.errors, *sorted(self.run_dir.glob("*.log"))]
        return "\n".join(
            f"--- {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-15:])
            for path in logs
            if path.exists()
        )

    # ---- talking to it

    def client(self, api_key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=DEADLINE_S
        )

    def post(self, path: str, body: object) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=DEADLINE_S)

    def metrics(self) -> Metrics:
        return parse_metrics(httpx.get(f"{self.url}/metrics", timeout=DEADLINE_S).text)

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples of ``name`` that carry ``labels``."""
        samples = self.metrics().get(name, {})
        return sum(value for given, value in samples.items() if labels.items() <= set(given))


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _is_in_use(path: Path) -> bool:
    """Whether a process that lives maps it; then it is not of a server that is gone."""
    for process in psutil.process_iter():
        with contextlib.suppress(OSError):
            if str(path) in Path(f"/proc/{process.pid}/maps").read_text():
                return True
    return False


@pytest.fixture(scope="session")
def free_port() -> Callable[[], int]:
    return servers.free_port


@pytest.fixture(scope="module")
def launch(
    tmp_path_factory: pytest.TempPathFactory, free_port: Callable[[], int]
) -> Iterator[Callable[..., Run]]:
    """``launch(*options, port=, env=)`` starts a run and returns at once."""
    with contextlib.ExitStack() as stack:

        def start(*options: str, port: int | None = None, env: Mapping[str, str] = {}) -> Run:
            folder = tmp_path_factory.mktemp("serve")
            run = Run(folder, port or free_port(), options, env)
            stack.callback(run.close)
            return run

        yield start


@pytest.fixture(scope="module")
def serve(launch: Callable[..., Run]) -> Callable[..., Run]:
    """``serve(*options, port=, env=)`` starts a small server and returns when it serves."""

    def start(*options: str, **how: object) -> Run:
        run = launch("--model", MODEL, *LIGHT, *options, **how)
        run.wait_for("Ctrl-C ends it.")
        return run

    return start


@pytest.fixture(scope="module")
def server(serve: Callable[..., Run], request: pytest.FixtureRequest) -> Iterator[Run]:
    """One server for a module: SERVE_OPTIONS says how it starts, END_SIGNAL how it ends."""
    run = serve(*getattr(request.module, "SERVE_OPTIONS", ()))
    yield run
    assert run.end(getattr(request.module, "END_SIGNAL", signal.SIGTERM)) == 0


@pytest.fixture(scope="session")
def poll() -> Callable[..., float]:
    """``poll(holds, what, deadline_s)``: for tests, which cannot import this file."""
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
