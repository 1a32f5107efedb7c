"""A balancer in front of the server, started again when it is killed, as a service manager does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx

from banaserve_bench.loadgen.servers import end_with_parent
from observing import until


class Router:
    """One ``banaserve route``.

    Args:
        port: The same after each start.
        replica: URL of the server.
    """

    def __init__(self, port: int, replica: str, folder: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._command = [sys.executable, "-P", "-m", "banaserve", "route", "--port", str(port)]
        self._command += ["--replica", replica, "--health-interval", "0.5"]
        self._log = folder / "route.log"
        self.start()

    def start(self) -> None:
        """Start it, and return when it has found its replica."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=log, preexec_fn=end_with_parent
            )
        until(self.is_ready, "the balancer has found its replica")

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/ready", timeout=5.0).status_code == 200
        except httpx.HTTPError:
            return False

    def start_again(self) -> None:
        """After it has been killed."""
        self._process.wait()
        self.start()

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
