"""One run of ``banaserve serve``, as a user starts it, and what it leaves behind."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
from prometheus_client.parser import text_string_to_metric_families

from banaserve_bench.loadgen import servers
from fork_server import MARK, ForkServer
from observing import until

START_DEADLINE_S = 240.0
END_DEADLINE_S = 60.0
"""Only what hangs takes as long; a busy machine takes ten seconds."""
DEADLINE_S = 60.0
_IN_SHM = re.compile(r"/dev/shm/\S+$", re.MULTILINE)

Metrics = dict[str, dict[frozenset[tuple[str, str]], float]]


def parse_metrics(page: str) -> Metrics:
    """``{name: {labels: value}}`` of a page in Prometheus' text format."""
    found: Metrics = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            found.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
    return found


class Run(servers.Server):
    """One run of ``banaserve serve`` and all processes that belong to it.

    Args:
        forks: Forks the server; None starts a Python of its own, as a user's shell does.
        within: What runs a command on a host of a test's network.
    """

    def __init__(
        self,
        folder: Path,
        port: int,
        options: tuple[str, ...],
        env: Mapping[str, str],
        forks: ForkServer | None,
        within: Callable[[Sequence[str]], list[str]] = list,
    ):
        self.port = port
        self.run_dir = folder / "run"
        self.errors = folder / "stderr"
        self._terminal = folder / "stdout"
        # Not below ``folder``: a socket's path has at most 107 characters.
        self.temp_dir = Path(tempfile.mkdtemp(prefix="bt-"))
        self._shm: set[Path] = set()
        self._mark = uuid.uuid4().hex
        self._seen: set[psutil.Process] = set()
        command = ["banaserve", "serve", "--port", str(port)]
        command += ["--run-dir", str(self.run_dir), *options]
        env = {**os.environ, **env, "TMPDIR": str(self.temp_dir), MARK: self._mark}
        with self._terminal.open("wb") as out, self.errors.open("wb") as err:
            self.process = (
                forks.start(command, env, out.fileno(), err.fileno())
                if forks is not None
                else subprocess.Popen(
                    within([sys.executable, "-P", "-m", *command]),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    env=env,
                    start_new_session=True,
                )
            )
        super().__init__(self.process, f"http://127.0.0.1:{port}", self._terminal)

    # ---- life

    def wait_for(self, text: str) -> None:
        """Return when it has printed ``text``."""

        def printed() -> bool:
            ended = self.process.poll() is not None
            if text in self.printed():
                return True
            assert not ended, f"ended with {self.process.returncode} before {text!r}"
            return False

        try:
            until(printed, f"{text!r} is printed", START_DEADLINE_S)
        except AssertionError as failure:
            raise AssertionError(f"{failure}\n{self.tails()}") from None
        self._note_shared_memory()

    def printed(self) -> str:
        """All that it has printed."""
        return self._terminal.read_text()

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal as a terminal does, to the process group; returns the exit code.

        Raises:
            AssertionError: Something is left after a minute.
        """
        self._note_shared_memory()
        os.killpg(self.process.pid, number)
        try:
            until(self.is_gone, "every process of the server has ended", END_DEADLINE_S)
        except AssertionError as failure:
            raise AssertionError(f"{failure}\n{self._living()}\n{self.tails()}") from None
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

    def _living(self) -> str:
        """Who has not ended, and what each of its threads waits for."""
        return "\n".join(_described(process) for process in self.processes())

    def _owns(self, process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error, OSError):
            return (
                os.getsid(process.pid) == self.process.pid
                or process.environ().get(MARK) == self._mark
            )
        return False

    def check_nothing_left(self) -> None:
        """No socket or other file in its temporary folder, none in /dev/shm, no note of a run."""
        assert list(self.temp_dir.iterdir()) == []
        until(self._leaves_no_memory, "every file of it in /dev/shm is gone", END_DEADLINE_S)
        assert not (self.run_dir / "run.json").exists()

    def _leaves_no_memory(self) -> bool:
        return not any(path.exists() for path in self._shm)

    def _note_shared_memory(self) -> None:
        self._shm.update(map(Path, _IN_SHM.findall(self.maps())))

    def maps(self) -> str:
        """The memory maps of all of its processes."""
        found = []
        for process in self.processes():
            with contextlib.suppress(OSError):
                found.append(Path(f"/proc/{process.pid}/maps").read_text())
        return "\n".join(found)

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
        return "\n".join(f"--- {path.name}\n{tail_of(path)}" for path in logs if path.exists())

    # ---- talking to it

    def client(self, api_key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=DEADLINE_S
        )

    def get(self, path: str, **how: Any) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=DEADLINE_S, **how)

    def post(self, path: str, body: object) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=DEADLINE_S)

    def is_ready(self, *names: str) -> bool:
        """Whether instances of these names all serve."""
        return all(self.metric("banaserve_instance_ready", instance_id=name) == 1 for name in names)

    def metrics(self) -> Metrics:
        return parse_metrics(self.get("/metrics").text)


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _described(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error, OSError):
        command = " ".join(process.cmdline())[:200]
        tasks = sorted(Path(f"/proc/{process.pid}/task").iterdir())
        waits = [f"{(task / 'comm').read_text().strip()} in {_wchan(task)}" for task in tasks]
        parent, cpu = process.ppid(), process.cpu_times()
        return (
            f"{process.pid} of {parent}, {process.status()}, {cpu.user:.1f} s + {cpu.system:.1f} s,"
            f" {command}: {'; '.join(waits)}"
        )
    return f"{process.pid} has ended meanwhile"


def _wchan(task: Path) -> str:
    return (task / "wchan").read_text() or "no call"


def tail_of(log: Path) -> str:
    """The last lines of a log, without those that say of each request that it was answered."""
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join([line for line in lines if "uvicorn.access" not in line][-25:])
