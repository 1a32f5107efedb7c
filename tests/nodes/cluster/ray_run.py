"""A small Ray cluster on the hosts of a network, as its users start one."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import psutil

from benchmarks.network.hosts import Host
from observing import until
from process_tree import ProcessTree

PORT = 6391
_START_S = 180.0
_RECONNECT_S = 5
"""So long nodes outlive the head; a minute where Ray is left as it is."""
_TOO_LATE = "The current node timed out during startup"
"""Ray ends a node that has not started within half a minute, as beside other tests: no option of it
says otherwise, so the node is started once more."""
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_gcs_rpc_server_reconnect_timeout_s": str(_RECONNECT_S),
}
_OWN_TEMP = 'mount --bind "$0" "$1" && shift && exec "$@"'
# As on a machine of its own: Ray refuses to start a head where it sees processes of one, and some
# of them lose their parents before they are seen. With its first process the kernel ends them all.
_OWN_PROCESSES = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


class RayNode:
    """Ray on one host: ``ray start --block``, and all that it starts.

    Args:
        folder: For its log.
        within: What runs it in a temporary folder of its own.
        env: Variables of its own, which also agents get that it starts.
    """

    def __init__(
        self, host: Host, folder: Path, within: list[str], env: Mapping[str, str], *words: str
    ) -> None:
        self.host = host
        self._log = folder / f"ray-{host.address}.log"
        ray = Path(sys.executable).with_name("ray")
        command = [str(ray), "start", "--block", "--node-ip-address", host.address]
        command += ["--object-store-memory", "100000000", "--disable-usage-stats", *words]
        self._command = host.command([*within, *_OWN_PROCESSES, *command])
        self._environment = {**os.environ, **_QUIET, **env}
        self._begin()

    def _begin(self) -> None:
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,
            )
        self.tree = ProcessTree(self.process.pid)

    def wait(self) -> None:
        """Until it takes part in the cluster."""

        def is_decided() -> bool:
            if self._has_ended() and _TOO_LATE in self._log.read_text():
                self._begin()
            return self._has_started() or self._has_ended()

        until(is_decided, "Ray has started", _START_S)
        assert self._has_started(), self._log.read_text()

    def _has_started(self) -> bool:
        return "Ray runtime started" in self._log.read_text()

    def _has_ended(self) -> bool:
        return self.process.poll() is not None

    def kill(self) -> None:
        """End all of it at once, as a machine that dies does; none of it is left on return."""
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended by itself
            for one in psutil.Process(self.process.pid).children() or [self.process]:
                one.kill()
        self.process.wait()


class RayCluster:
    """A head without CPUs on the first host, and a node on others.

    Args:
        num_nodes: That are started with it; ``start_node`` starts one on a host that has none.
        env: Variables that agents get, too.
    """

    def __init__(
        self,
        hosts: list[Host],
        folder: Path,
        num_cpus: int,
        num_nodes: int | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._env = env or {}
        self._num_nodes = len(hosts) - 1 if num_nodes is None else num_nodes
        self._folder, self._num_cpus = folder, num_cpus
        # Paths of its sockets are longer than those that pytest's folders leave room for. Ray uses
        # the path that its head does on every node: there another folder lies in its place.
        self._temp = tempfile.mkdtemp(prefix="br-")
        self._temps = [tempfile.mkdtemp(prefix="br-") for _ in hosts[1:]]
        self._hosts = hosts
        self.address = f"{hosts[0].address}:{PORT}"
        self.head, self.nodes = self._start_head(), list[RayNode]()
        try:
            self.start()
        except BaseException:
            self.close()
            raise

    def start(self) -> None:
        """Start all of it, in place of what there was."""
        if self.head.process.poll() is not None:
            self.head = self._start_head()
        self.head.wait()
        self.nodes = [self.start_node(number) for number in range(self._num_nodes)]
        for node in self.nodes:
            node.wait()

    def _start_head(self) -> RayNode:
        words = ("--port", str(PORT), "--num-cpus", "0", "--include-dashboard", "false")
        words += ("--head", "--temp-dir", self._temp)
        return RayNode(self._hosts[0], self._folder, [], self._env, *words)

    def start_node(self, number: int) -> RayNode:
        words = ("--address", self.address, "--num-cpus", str(self._num_cpus))
        within = ["sh", "-c", _OWN_TEMP, self._temps[number], self._temp]
        return RayNode(self._hosts[1 + number], self._folder, within, self._env, *words)

    def close(self) -> None:
        for node in (*self.nodes, self.head):
            node.kill()
        for temp in (self._temp, *self._temps):
            shutil.rmtree(temp, ignore_errors=True)
