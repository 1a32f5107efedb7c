"""One run of ``banaserve node``, as a user starts it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import psutil

from banaserve.base.access.key_files import CLUSTER_KEY_VARIABLE
from fork_server import ForkedProcess
from observing import until
from process_tree import ProcessTree
from server_run import tail_of

END_S = 60.0
Within = Callable[[Sequence[str]], list[str]]


class Forks(Protocol):
    """What forks an agent in place of a Python of its own: ``ForkServer`` or what stands for it."""

    def start(
        self, argv: Sequence[str], env: Mapping[str, str], stdout: int, stderr: int
    ) -> ForkedProcess: ...


class NodeRun:
    """An agent and all that it runs.

    Args:
        folder: For its logs.
        within: What runs a command on a host of a test's network.
        env: Variables of its own.
        forks: Fork server of the process, without ``within``; None starts a Python of its own.

    Attributes:
        address: ``HOST:PORT``.
    """

    def __init__(
        self,
        folder: Path,
        address: str,
        key: str,
        within: Within = list,
        env: Mapping[str, str] | None = None,
        forks: Forks | None = None,
    ) -> None:
        self.address = address
        self.run_dir = folder
        # Not below ``folder``: a socket's path has at most 107 characters.
        self.temp_dir = Path(tempfile.mkdtemp(prefix="bn-"))
        self._terminal = folder.with_suffix(".out")
        command = ["banaserve", "node", "--listen", address, "--run-dir", str(folder)]
        env = {**os.environ, **(env or {})}
        env |= {CLUSTER_KEY_VARIABLE: key, "TMPDIR": str(self.temp_dir)}
        with self._terminal.open("wb") as out:
            self.process = (
                forks.start(command, env, out.fileno(), out.fileno())
                if forks is not None
                else subprocess.Popen(
                    within([sys.executable, "-P", "-m", *command]),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    env=env,
                    start_new_session=True,
                )
            )
        self._tree = ProcessTree(self.process.pid)

    def wait_for(self, text: str) -> None:
        until(lambda: text in self.printed(), f"the node prints {text!r}")

    def printed(self) -> str:
        return self._terminal.read_text()

    def processes(self) -> list[psutil.Process]:
        """The agent and all below it that live."""
        return self._tree.alive()

    def signal_all(self, number: int) -> None:
        """Send a signal to every process of this node, as a machine that stops or dies does."""
        self._tree.signal(number)

    def end(self, number: int = signal.SIGTERM) -> None:
        """End it; nothing of it is left after half a minute.

        Raises:
            AssertionError: Something is.
        """
        self.processes()
        if self.process.poll() is None:
            self.process.send_signal(number)
        until(lambda: self.process.poll() is not None, "the agent ends", END_S)
        until(lambda: not self.processes(), "all that it ran ends", END_S)

    def close(self) -> None:
        """End it whatever a test has left it in."""
        self.signal_all(signal.SIGKILL)
        self.process.wait()
        shutil.rmtree(self.temp_dir, ignore_errors=True)

    def tails(self) -> str:
        """The last lines of what it has written."""
        logs = [self._terminal, *sorted(self.run_dir.glob("*.log"))]
        return "\n".join(f"--- node {self.address} {log.name}\n{tail_of(log)}" for log in logs)
