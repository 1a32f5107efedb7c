"""Supervision of the daemon: a child process that is started again when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from banaserve.errors import StoreUnavailableError, UserError
from banaserve.kvstore.admin import fetch_stats
from banaserve.kvstore.daemon.options import StoreOptions
from banaserve.processes import wait_ended

log = logging.getLogger(__name__)

FIRST_RESTART_S = 0.2
LONGEST_RESTART_S = 10.0
STOP_S = 6.0
"""A little more than what the daemon takes for writing to tiers and closing them."""


class SupervisedStore:
    """Owns one daemon process.

    Args:
        socket_path: Where it listens.
        options: How to run it.
        log_path: Gets its output.
        on_restart: Called each time it has to be started again.
    """

    def __init__(
        self,
        socket_path: Path,
        options: StoreOptions,
        log_path: Path,
        on_restart: Callable[[], None],
    ) -> None:
        self.socket_path = socket_path
        self.pid = 0
        self._options = options
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

    async def problems(self) -> list[str]:
        """One line for each tier that is out of service; none where the store does not answer."""
        try:
            stats = await asyncio.to_thread(fetch_stats, self.socket_path)
        except StoreUnavailableError:
            return []
        return [
            f"going on without the store's {tier.stats.name} tier: {tier.stats.problem}"
            for tier in stats.tiers
            if not tier.stats.available
        ]

    async def _launch(self) -> None:
        readable, writable = os.pipe()
        try:
            try:
                self._process = self._spawn(writable)
            finally:
                os.close(writable)
            self.pid = self._process.pid
            ready = await asyncio.to_thread(os.read, readable, 16)
        finally:
            os.close(readable)
        if not ready:
            self._process.wait()
            raise UserError(f"the KV cache store did not start: {self._last_line()}")

    def _spawn(self, ready_fd: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "banaserve.kvstore.daemon", "--die-with-parent"]
        command += ["--socket", str(self.socket_path), "--ready-fd", str(ready_fd)]
        command += self._options.arguments()
        with self._log_path.open("ab") as output:
            return subprocess.Popen(
                command, stdout=output, stderr=output, pass_fds=(ready_fd,), start_new_session=True
            )

    def _last_line(self) -> str:
        lines = self._log_path.read_text(errors="replace").strip().splitlines()
        return lines[-1].removeprefix("kvstore: ") if lines else f"see {self._log_path}"

    async def _keep_alive(self) -> None:
        pause_s = FIRST_RESTART_S
        while True:
            process = self._process
            assert process is not None
            # The pid of one that was waited for may be another process's by now.
            if process.returncode is None:
                await wait_ended(process.pid)
                process.wait()
            self._on_restart()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_RESTART_S)
            try:
                await self._launch()
            except (UserError, OSError) as error:
                log.error("%s", error)

    async def stop(self) -> None:
        """End the daemon and wait until it has written to its tiers and its socket is gone."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        process = self._process
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.to_thread(process.wait, STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self.socket_path.unlink(missing_ok=True)
