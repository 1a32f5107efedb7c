"""The store daemon as a child process that is started again when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from banaserve.errors import UserError
from banaserve.processes import wait_ended

FIRST_RESTART_S = 0.2
LONGEST_RESTART_S = 10.0


class SupervisedStore:
    """Owns one daemon process.

    Args:
        socket_path: Where it listens.
        size: Memory for blocks, such as ``2GiB``.
        log_path: Gets its output.
        on_restart: Called each time it has to be started again.
    """

    def __init__(
        self, socket_path: Path, size: str, log_path: Path, on_restart: Callable[[], None]
    ) -> None:
        self.socket_path = socket_path
        self.pid = 0
        self._size = size
        self._log_path = log_path
        self._on_restart = on_restart
        self._process: subprocess.Popen[bytes] | None = None
        self._keeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the daemon, return when clients can connect, and keep it alive from then on.

        Raises:
            UserError: It cannot run; the message is its own.
        """
        await self._launch()
        self._keeper = asyncio.create_task(self._keep_alive())

    async def _launch(self) -> None:
        readable, writable = os.pipe()
        command = [sys.executable, "-m", "banaserve.kvstore.daemon", "--die-with-parent"]
        command += ["--socket", str(self.socket_path), "--size", self._size]
        command += ["--ready-fd", str(writable)]
        self._process = self._spawn(command, writable)
        os.close(writable)
        self.pid = self._process.pid
        try:
            ready = await asyncio.to_thread(os.read, readable, 16)
        finally:
            os.close(readable)
        if not ready:
            self._process.wait()
            raise UserError(f"the KV cache store did not start: {self._last_line()}")

    def _spawn(self, command: list[str], ready_fd: int) -> subprocess.Popen[bytes]:
        with self._log_path.open("ab") as log:
            return subprocess.Popen(
                command, stdout=log, stderr=log, pass_fds=(ready_fd,), start_new_session=True
            )

    def _last_line(self) -> str:
        lines = self._log_path.read_text(errors="replace").strip().splitlines()
        return lines[-1].removeprefix("kvstore: ") if lines else f"see {self._log_path}"

    async def _keep_alive(self) -> None:
        pause_s = FIRST_RESTART_S
        while True:
            process = self._process
            assert process is not None
            await wait_ended(process.pid)
            process.wait()
            self._on_restart()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_RESTART_S)
            with contextlib.suppress(UserError):
                await self._launch()

    async def stop(self) -> None:
        """End the daemon and wait until its socket is gone."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        process = self._process
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.to_thread(process.wait, 3.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self.socket_path.unlink(missing_ok=True)
