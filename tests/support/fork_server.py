"""Servers forked from one process that has imported what ``banaserve serve`` imports.

Importing vLLM is most of a server's start, and the same each time. A child is otherwise what
``python -P -m banaserve`` is: it takes its arguments, environment, session and output, runs the
module ``banaserve`` as ``__main__`` at the bottom of its stack and ends as an interpreter does.

What a library reads from the environment while it is imported is that of the tests; of variables of
its own a child takes those that are read later, and PYTHONPATH. A run that needs others starts a
Python of its own.

Usage: python -P fork_server.py FD, with FD a listening Unix socket. It ends with its last client.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from banaserve_bench.loadgen.servers import end_with_parent

MARK = "BANASERVE_TEST_RUN"
"""Variable by which the processes of a run are found, whoever their parent is."""
_NO_MARK = "0" * 32
_MAX_ORDER_BYTES = 1 << 17


# The tests' side ----------------------------------------------------------------------------------


class _Started:
    cpu_s = 0.0
    fork_servers: ClassVar[set[int]] = set()


def fork_servers() -> set[int]:
    """Process ids of the fork servers that this process has started, also for other processes."""
    return _Started.fork_servers


def cpu_s_of_ended() -> float:
    """Core-seconds of forked processes that have ended and that this process had asked for."""
    return _Started.cpu_s


class ForkedProcess:
    """A child of the fork server, as ``subprocess.Popen`` shows its own.

    Attributes:
        returncode: None while it runs.
    """

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._connection = connection

    def poll(self) -> int | None:
        """Its exit code, None while it runs."""
        return self._read(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; returns the exit code.

        Raises:
            subprocess.TimeoutExpired: It has not ended.
        """
        code = self._read(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # Reaped before we are told.
                os.kill(self.pid, number)

    def _read(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                said = self._connection.recv(_MAX_ORDER_BYTES)
            except (BlockingIOError, TimeoutError):
                return None
            assert said, "the fork server has ended"
            code, cpu_s = said.split()
            self.returncode = int(code)
            _Started.cpu_s += float(cpu_s)
            self._connection.close()
        return self.returncode


class ForkServer:
    """A fork server that this process uses, and started unless another one had.

    Args:
        path: Of its socket, the same for all that share one.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lease = self._connect()

    def start(
        self, argv: Sequence[str], env: Mapping[str, str], stdout: int, stderr: int
    ) -> ForkedProcess:
        """Start ``python -P -m MODULE ARGS``, or a script, in a session of its own.

        Args:
            argv: The module or the path of the script, and its arguments.
        """
        connection = self._connect()
        order = json.dumps({"argv": list(argv), "env": dict(env), "cwd": os.getcwd()})
        socket.send_fds(connection, [order.encode()], [stdout, stderr])
        said = connection.recv(_MAX_ORDER_BYTES)
        assert said, "the fork server has ended: what it wrote is in the tests' stderr"
        return ForkedProcess(connection, int(said))

    def close(self) -> None:
        self._lease.close()

    def _connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with self._path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another may be about to start one
            try:
                connection.connect(str(self._path))
            except (FileNotFoundError, ConnectionRefusedError):
                self._launch()
                connection.connect(str(self._path))
        return connection

    def _launch(self) -> None:
        self._path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(self._path))
            listener.listen()
            number = listener.fileno()
            process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(number)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, MARK: _NO_MARK},
                pass_fds=(number,),
                start_new_session=True,
            )
            _Started.fork_servers.add(process.pid)


# The fork server ----------------------------------------------------------------------------------


def main() -> None:
    mark = _Mark()
    listener = socket.socket(fileno=int(sys.argv[1]))
    _import()
    order = _Forks(listener).serve()
    if order is None:
        os._exit(0)  # native libraries that vLLM loads would report their own leaks
    mark.write(order["env"].get(MARK, _NO_MARK))
    _become(order)
    _run(order["argv"][0])


def _import() -> None:
    """What a server has imported when it forks the parent of its engines."""
    # Before vLLM chooses its kernels; folders of tests are not on the path here.
    runpy.run_path(str(Path(__file__).with_name("processor_claims.py")))["apply"]()
    for name in (
        "banaserve.cli.main",
        "banaserve.cli.serve.command",
        "banaserve.cli.serve.launch",
        "banaserve.mains.serve",
        "uvloop",
    ):
        importlib.import_module(name)
    from banaserve.contracts.environment import set_environment
    from banaserve.mains.engine_parent import pre_import

    set_environment()
    pre_import()
    _load_tokenizer()
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"{len(threads)} threads: a forked child would lack all but one"
    gc.collect()
    gc.freeze()  # or each child's first collection copies every page


def _load_tokenizer() -> None:
    """Fill vLLM's caches with what servers and engines of the small model read of its tokenizer."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.renderers.hf import resolve_chat_template
    from vllm.tokenizers import cached_tokenizer_from_config

    small_model = runpy.run_path(str(Path(__file__).with_name("small_model.py")))
    config = EngineArgs(small_model["resolve"]().path_or_id).create_model_config()
    tokenizer: Any = cached_tokenizer_from_config(config)
    resolve_chat_template(tokenizer, chat_template=None, tools=None, model_config=config)


class _Mark:
    """The value of ``MARK`` in ``/proc/PID/environ``, which a fork alone does not change."""

    def __init__(self) -> None:
        getenv = ctypes.CDLL(None).getenv
        getenv.restype = ctypes.c_void_p
        self._address = getenv(MARK.encode())

    def write(self, value: str) -> None:
        assert len(value) == len(_NO_MARK)
        ctypes.memmove(self._address, value.encode(), len(value))


class _Forks:
    """Forks on request, tells of pids and exits; single-threaded."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._connections: set[socket.socket] = set()
        self._children: dict[int, socket.socket] = {}
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_write.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._order: dict[str, Any] | None = None

    def serve(self) -> dict[str, Any] | None:
        """Returns an order in each child, and None when the last client has gone."""
        signal.set_wakeup_fd(self._wake_write.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._reap)
        has_clients = True
        while has_clients:
            for key, _ in self._selector.select():
                key.data()
                if self._order is not None:
                    self._leave()
                    return self._order
            has_clients = bool(self._connections)
        return None

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        self._connections.add(connection)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._obey(connection))

    def _obey(self, connection: socket.socket) -> None:
        order, fds, _, _ = socket.recv_fds(connection, _MAX_ORDER_BYTES, 2)
        if not order:
            self._forget(connection)
            return
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            self._order = {**json.loads(order), "fds": fds}
            return
        for fd in fds:
            os.close(fd)
        self._children[pid] = connection
        connection.send(str(pid).encode())

    def _forget(self, connection: socket.socket) -> None:
        """A client has gone, or has heard of its child's end; a child that lives ends with it."""
        for pid, other in self._children.items():
            if other is connection:
                os.kill(pid, signal.SIGTERM)
        self._selector.unregister(connection)
        self._connections.discard(connection)
        connection.close()

    def _reap(self) -> None:
        self._wake_read.recv(4096)
        while self._children:
            pid, status, used = os.wait4(-1, os.WNOHANG)
            if pid == 0:
                return
            connection = self._children.pop(pid)
            if connection in self._connections:
                code = os.waitstatus_to_exitcode(status)
                connection.send(f"{code} {used.ru_utime + used.ru_stime}".encode())

    def _leave(self) -> None:
        """In a child: nothing of the fork server stays open or set."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        for one in (self._listener, self._wake_read, self._wake_write, *self._connections):
            one.close()


def _become(order: dict[str, Any]) -> None:
    """Let this child be what a process is that was just started."""
    # Native libraries that are imported here, and not yet in a start that ends early, report their
    # own leaks at the end.
    atexit.register(_hush)
    end_with_parent()
    os.setsid()
    stdout, stderr = order["fds"]
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.close(stdout)
    os.close(stderr)
    os.chdir(order["cwd"])
    theirs, ours = (_path_of(env) for env in (order["env"], os.environ))
    sys.path[:] = [*theirs, *(place for place in sys.path if place not in ours)]
    os.environ.clear()
    os.environ.update(order["env"])
    tempfile.tempdir = None
    sys.argv[:] = order["argv"]


def _hush() -> None:
    sys.stderr.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _path_of(env: Mapping[str, str]) -> list[str]:
    return [place for place in env.get("PYTHONPATH", "").split(os.pathsep) if place]


def _run(program: str) -> None:
    """Run a script or a module as Python does from the command line."""
    if program.endswith(".py"):
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
