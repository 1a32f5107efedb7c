"""Supervision of the daemon: a child process that is started again when it dies or hangs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from banaserve.base.errors import StoreUnavailableError, UserError
from banaserve.base.platform.processes import in_daemon_thread, wait_ended, wait_readable
from banaserve.base.platform.run_dir import tail_of
from banaserve.base.platform.stall_watch import StallWatch
from banaserve.base.tasks import end_tasks
from banaserve.kvstore.client.admin import fetch_stats, set_peers
from banaserve.kvstore.daemon.options import StoreOptions

log = logging.getLogger(__name__)

FIRST_RESTART_S = 0.2
LONGEST_RESTART_S = 10.0
HEALTHY_S = 3600.0
"""Lifetime in seconds after which a daemon that ends is restarted after the first, short pause."""
STOP_S = 6.0
"""Maximum wait for the daemon to stop, in seconds; a little more than it takes to write to tiers
and close them."""


@dataclass(frozen=True, slots=True)
class StoreTimeouts:
    """Time limits after which a daemon that does not answer is killed.

    Attributes:
        probe_s: Pause before each probe of the daemon, in seconds.
        answer_s: Maximum wait for an answer, in seconds.
        stall_s: Maximum silence of a daemon that uses no processor, also while it starts, in
            seconds.
        spin_s: Maximum silence of a daemon that uses a processor, in seconds.
    """

    probe_s: float = 2.0
    answer_s: float = 5.0
    stall_s: float = 15.0
    spin_s: float = 60.0


class SupervisedStore:
    """Supervisor of one daemon process, whose output is appended to the file ``log_path``.

    ``on_restart`` is called before each restart. ``now_s`` is the clock for the silence that
    ``timeouts`` limits, in seconds.
    """

    def __init__(
        self,
        socket_path: Path,
        options: StoreOptions,
        log_path: Path,
        on_restart: Callable[[], None],
        timeouts: StoreTimeouts = StoreTimeouts(),
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.socket_path = socket_path
        self.pid = 0
        self._options = options
        self._log_path = log_path
        self._on_restart = on_restart
        self._timeouts = timeouts
        self._now_s = now_s
        self._process: subprocess.Popen[bytes] | None = None
        self._keeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the daemon, return when clients can connect, and keep it alive from then on.

        Raises:
            UserError: The daemon cannot run; the message is the daemon's own.
        """
        await self._launch()
        self._keeper = asyncio.create_task(self._keep_alive())

    async def problems(self) -> list[str]:
        """Return a line for each tier out of service; none if the store does not answer."""
        try:
            stats = await in_daemon_thread(lambda: fetch_stats(self.socket_path))
        except StoreUnavailableError:
            return []
        return [
            f"going on without the store's {tier.stats.name} tier: {tier.stats.problem}"
            for tier in stats.tiers
            if not tier.stats.available
        ]

    async def set_peers(self, peers: Sequence[str]) -> None:
        """Let the store fetch blocks from these stores, and from no others; also after a restart.

        Raises:
            UserError: An address is invalid, or the store was started without a key of peers.
        """
        options = replace(self._options, peers=replace(self._options.peers, peers=tuple(peers)))
        options.peers.check()
        self._options = options
        await self._tell_peers()

    async def _tell_peers(self) -> None:
        peers = self._options.peers.peers
        try:
            await in_daemon_thread(lambda: set_peers(self.socket_path, peers))
        except StoreUnavailableError as error:
            log.warning("its peers are told when it has been started again: %s", error)
        except UserError as error:  # not of the peers, which are checked: it lacks threads
            log.error("the KV cache store goes on: %s", error)

    async def _launch(self) -> None:
        launched = self._options
        readable, writable = os.pipe()
        try:
            try:
                self._process = self._spawn(writable)
            finally:
                os.close(writable)
            self.pid = self._process.pid
            await self._until_written(readable, self._process)
            is_ready = bool(os.read(readable, 16))
        finally:
            os.close(readable)
        if not is_ready:
            self._process.kill()
            self._process.wait()
            raise UserError(f"the KV cache store did not start: {self._last_line()}")
        if self._options is not launched:
            await self._tell_peers()

    async def _until_written(self, readable: int, process: subprocess.Popen[bytes]) -> None:
        """Wait until a starting daemon reports that it is ready, or ends; kill it if it hangs."""
        written = asyncio.create_task(wait_readable([readable]))
        watch = self._watch()
        try:
            while not written.done():
                await asyncio.wait({written}, timeout=self._timeouts.probe_s)
                if not written.done() and watch.has_stalled_starting(process.pid, self._now_s()):
                    log.error("the KV cache store hangs while it starts: it is ended")
                    process.kill()
        finally:
            await end_tasks(written)

    def _watch(self) -> StallWatch:
        return StallWatch(self._timeouts.stall_s, self._timeouts.spin_s, counts_work=True)

    def _spawn(self, ready_fd: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "banaserve.kvstore.daemon", "--die-with-parent"]
        command += ["--socket", str(self.socket_path), "--ready-fd", str(ready_fd)]
        command += self._options.arguments()
        with self._log_path.open("ab") as output:
            return subprocess.Popen(
                command,
                stdout=output,
                stderr=output,
                env={**os.environ, **self._options.environment()},
                pass_fds=(ready_fd,),
                start_new_session=True,
            )

    def _last_line(self) -> str:
        lines = tail_of(self._log_path).strip().splitlines()
        return lines[-1].removeprefix("kvstore: ") if lines else f"see {self._log_path}"

    async def _keep_alive(self) -> None:
        pause_s = FIRST_RESTART_S
        while True:
            process = self._process
            assert process is not None
            # A process that was already waited for: its pid may be another process's by now.
            began_s = time.monotonic()
            if process.returncode is None:
                await self._until_ended(process)
                process.wait()
            if time.monotonic() - began_s >= HEALTHY_S:
                pause_s = FIRST_RESTART_S
            self._on_restart()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_RESTART_S)
            try:
                await self._launch()
            except (UserError, OSError) as error:
                log.error("%s", error)

    async def _until_ended(self, process: subprocess.Popen[bytes]) -> None:
        probing = asyncio.create_task(self._end_when_hung(process))
        try:
            await wait_ended(process.pid)
        finally:
            await end_tasks(probing)

    async def _end_when_hung(self, process: subprocess.Popen[bytes]) -> None:
        """Probe the daemon repeatedly; kill it when it has not answered for too long."""
        watch, heard_s = self._watch(), self._now_s()
        was_silent = is_silent = False
        while not (was_silent and is_silent):
            await asyncio.sleep(self._timeouts.probe_s)
            # Checked before and after a probe: perhaps this process was stalled, not the daemon.
            was_silent = watch.has_stalled(process.pid, heard_s, self._now_s())
            if await self._answers():
                heard_s = self._now_s()
            is_silent = watch.has_stalled(process.pid, heard_s, self._now_s())
        silent_s = self._now_s() - heard_s
        log.error("the KV cache store has not answered for %.0f s: it is ended", silent_s)
        process.kill()

    async def _answers(self) -> bool:
        answer_s = self._timeouts.answer_s
        try:
            await in_daemon_thread(lambda: fetch_stats(self.socket_path, answer_s))
        except StoreUnavailableError:
            return False
        return True

    async def stop(self) -> None:
        """Stop the daemon, wait until it has written to its tiers, and remove its socket."""
        await end_tasks(self._keeper)
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
