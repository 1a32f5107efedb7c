"""Ray actor that keeps a node's agent alive: the agent is a separate process.

Engines inside an actor would lose its placement group, and would get the environment variables that
Ray sets for its own tasks.
"""

from __future__ import annotations

import os
import subprocess
import sys

from banaserve.base.access.key_files import CLUSTER_KEY_VARIABLE

_START_S = 60.0
# Set by Ray for its own tasks; here the server decides the number of threads.
_TAKEN_OUT = ("OMP_NUM_THREADS",)


class AgentActor:
    """Actor that runs ``banaserve node`` as a process beside itself.

    Args:
        key: Key of the cluster.
    """

    def __init__(self, key: str) -> None:
        import ray

        self._key = key
        self._host: str = ray.util.get_node_ip_address()
        self._agent: subprocess.Popen[bytes] | None = None
        self._port = 0

    def address(self) -> tuple[str, int]:
        """Return the address of the agent; start an agent if none runs.

        Raises:
            RuntimeError: The agent does not start.
        """
        if self._agent is None or self._agent.poll() is not None:
            self._port = self._start()
        return self._host, self._port

    def _start(self) -> int:
        readable, writable = os.pipe()
        command = [sys.executable, "-m", "banaserve", "node", "--listen", f"{self._host}:0"]
        command += ["--ready-fd", str(writable), "--die-with", str(os.getpid())]
        environment = {n: v for n, v in os.environ.items() if n not in _TAKEN_OUT}
        try:
            self._agent = subprocess.Popen(
                command,
                env={**environment, CLUSTER_KEY_VARIABLE: self._key},
                stdin=subprocess.DEVNULL,
                pass_fds=(writable,),
                start_new_session=True,
            )
        finally:
            os.close(writable)
        with os.fdopen(readable) as said:
            port = said.readline().strip()
        if not port:
            raise RuntimeError(f"banaserve node has ended with {self._agent.wait(_START_S)}")
        return int(port)
