"""Servers that a benchmark starts for itself: banaserve, or vLLM's own for comparison."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import psutil

from banaserve.base.errors import UserError
from banaserve.contracts.environment import engine_environment
from banaserve_bench.loadgen.metrics_page import fetch, samples_of

LOGS_VARIABLE = "BANASERVE_BENCH_LOGS"
SHARES_GPU = ("--gpu-memory-utilization", "0.4")
"""Options of an engine beside another one on a GPU: it refuses to start where less is free."""
_START_TIMEOUT_S = 300.0
_FOUND_TIMEOUT_S = 20.0
_AVAILABLE = "banaserve_route_target_available"
_PR_SET_PDEATHSIG = 1
_GIVEN_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_PORT = 10240
_PORT_TRIES = 100


def _thread_cpu_s(pid: int) -> float:
    """Return CPU seconds of all live threads of a process."""
    total_ns = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        # schedstat counts nanoseconds; the times of ps count hundredths of a second.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            total_ns += int((thread / "schedstat").read_text().split()[0])
    return total_ns / 1e9


class Server:
    """A running server and all processes below it."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log_path: Path) -> None:
        self.url = url
        self.log_path = log_path
        self._process = process

    def processes(self) -> list[psutil.Process]:
        """Return all live processes; a parent comes before its children."""
        root = psutil.Process(self._process.pid)
        return [root, *root.children(recursive=True)]

    def cpu_s(self) -> float:
        """Return CPU seconds (user and system) of all live processes since their start."""
        total_s = 0.0
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total_s += times.user + times.system
        return total_s

    def front_cpu_s(self) -> float:
        """Return CPU seconds of all live threads of the process that answers HTTP."""
        return _thread_cpu_s(self._process.pid)

    def precise_cpu_s(self) -> float:
        """Return CPU seconds of all live threads of all live processes."""
        return sum(_thread_cpu_s(process.pid) for process in self.processes())

    def front_memory_bytes(self) -> int:
        """Return the memory of the process that answers HTTP; shared pages count in part (PSS)."""
        return int(psutil.Process(self._process.pid).memory_full_info().pss)

    def memory_bytes(self) -> int:
        """Return the memory of all processes; pages that several share count once in all (PSS)."""
        total = 0
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                total += process.memory_full_info().pss
        return total

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of the samples of ``name`` that carry ``labels``."""
        page = fetch(f"{self.url}/metrics?{urllib.parse.urlencode({'name[]': name})}")
        return sum(
            one.value
            for one in samples_of(page, name)
            if one.name == name and labels.items() <= one.labels.items()
        )

    def wait_ready(self) -> None:
        """Return when the server answers.

        Raises:
            UserError: The server ended, or did not answer in time.
        """
        until_s = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < until_s:
            if self._process.poll() is not None:
                break
            with contextlib.suppress(urllib.error.URLError, OSError):
                urllib.request.urlopen(f"{self.url}/health", timeout=2).close()
                return
            time.sleep(0.2)
        last = self.log_path.read_text(errors="replace").strip().splitlines()[-1:]
        raise UserError(f"the server did not start: {' '.join(last)} (log: {self.log_path})")

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def banaserve_server(
    model: str,
    *options: str,
    environment: Mapping[str, str] | None = None,
    port: int | None = None,
) -> AbstractContextManager[Server]:
    """Run ``banaserve serve`` with ``options``, on ``port`` or a free port of this machine."""
    command = [sys.executable, "-m", "banaserve", "serve", "--model", model]
    return command_server([*command, *options], "banaserve", environment, port)


class Balanced:
    """Servers behind one balancer; the methods are those of ``Server``, over all of them."""

    def __init__(self, balancer: Server, servers: Sequence[Server]) -> None:
        self.url = balancer.url
        self._all = (balancer, *servers)

    def processes(self) -> list[psutil.Process]:
        return [process for one in self._all for process in one.processes()]

    def cpu_s(self) -> float:
        return sum(one.cpu_s() for one in self._all)

    def memory_bytes(self) -> int:
        return sum(one.memory_bytes() for one in self._all)


Running = Server | Balanced
"""Servers behind one URL."""


@contextlib.contextmanager
def balanced_servers(count: int, policy: str, model: str, *options: str) -> Iterator[Balanced]:
    """Run ``count`` ``banaserve serve`` behind a ``banaserve route`` that has found them all.

    Raises:
        UserError: A server does not start.
    """
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(banaserve_server(model, *options)) for _ in range(count)]
        yield stack.enter_context(balanced(policy, servers))


@contextlib.contextmanager
def balanced(policy: str, servers: Sequence[Server]) -> Iterator[Balanced]:
    """Run a ``banaserve route`` that has found all ``servers``, which stay when it ends."""
    command = route_command(policy, [server.url for server in servers])
    with command_server(command, "balancer") as balancer:
        wait_until(
            lambda: balancer.metric(_AVAILABLE) >= len(servers),
            _FOUND_TIMEOUT_S,
            "the balancer did not find its replicas",
        )
        yield Balanced(balancer, servers)


def route_command(policy: str, urls: Sequence[str]) -> list[str]:
    """Return the command of ``banaserve route`` in front of ``urls``, without ``--port``."""
    command = [sys.executable, "-m", "banaserve", "route", "--policy", policy]
    return [*command, *(f"--replica={url}" for url in urls)]


def wait_until(is_so: Callable[[], bool], timeout_s: float, problem: str) -> None:
    """Return when ``is_so`` returns true. Blocking.

    Raises:
        UserError: It does not within ``timeout_s``; the message is ``problem``.
    """
    until_s = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > until_s:
            raise UserError(problem)
        time.sleep(0.1)


def vllm_server(
    model_path: str,
    served_name: str,
    *options: str,
    environment: Mapping[str, str] | None = None,
    port: int | None = None,
) -> AbstractContextManager[Server]:
    """Run vLLM's own API server over one engine, on ``port`` or a free port of this machine."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", model_path, "--served-model-name", served_name]
    command += ["--host", "127.0.0.1", *options]
    return command_server(command, "vllm", environment, port)


def end_on_sigterm() -> None:
    """Let SIGTERM unwind this process, so that the servers it started end with it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


@contextlib.contextmanager
def command_server(
    command: Sequence[str],
    name: str,
    environment: Mapping[str, str] | None = None,
    port: int | None = None,
) -> Iterator[Server]:
    """Run ``command`` with ``--port``; it is up once it answers ``/health``.

    Args:
        name: Name of its log, without the ending.
        environment: Variables in addition to those of this process.
        port: Port of this machine; a free one without it.
    """
    port = free_port() if port is None else port
    variables = {
        "OMP_NUM_THREADS": "1",
        **engine_environment(),
        **os.environ,
        **(environment or {}),
    }
    with log_folder() as folder:
        log_path = folder / f"{name}.log"
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [*command, "--port", str(port)],
                stdout=log,
                stderr=log,
                env=variables,
                # A process group to end as a whole, but no session: Linux divides a busy machine by
                # sessions, so a system of two servers would get twice as much of it as one of a
                # single server.
                process_group=0,
                preexec_fn=end_with_parent,
            )
        server = Server(process, f"http://127.0.0.1:{port}", log_path)
        try:
            server.wait_ready()
            yield server
        finally:
            server.stop()


@contextlib.contextmanager
def log_folder() -> Iterator[Path]:
    """Yield a new folder for logs, which is removed unless an error leaves the block.

    With the variable ``BANASERVE_BENCH_LOGS`` it is made in the folder of that name, and stays.
    """
    kept = os.environ.get(LOGS_VARIABLE)
    if kept:
        Path(kept).mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir=kept))
    yield folder
    # Not reached by an error: its message may name a log.
    if not kept:
        shutil.rmtree(folder, ignore_errors=True)


def end_with_parent() -> None:
    """Let this child process end with SIGTERM when the benchmark or the test is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def free_port() -> int:
    """Return a loopback port that is free at this moment.

    The port is below the range that the kernel gives to connections: such a connection could occupy
    the port of a server that is restarted, and a client that connects to a closed port of that
    range may even reach itself.

    Raises:
        UserError: No free port was found.
    """
    first_given = int(_GIVEN_PORTS.read_text().split()[0])
    for _ in range(_PORT_TRIES):
        port = random.SystemRandom().randrange(_FIRST_PORT, max(first_given, 2 * _FIRST_PORT))
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise UserError("no port of 127.0.0.1 is free: end some servers")
