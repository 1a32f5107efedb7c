"""The store's daemon on a virtual machine, kept alive by the real supervisor."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from banaserve.base.errors import StoreUnavailableError
from banaserve.kvstore.daemon.supervised import SupervisedStore
from seeded_engine import SharedStore
from seeded_machine import Troubles

T = TypeVar("T")
_NOWHERE = Path("/nowhere/kvstore.s")


class _Daemon:
    """One process of it; see ``subprocess.Popen``."""

    def __init__(self, pid: int, store: SharedStore, ready_fd: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.ready_fd = os.dup(ready_fd)
        self.ended = asyncio.Event()
        self._store = store

    def kill(self) -> None:
        if self.returncode is None:
            self.returncode = -9
            self._store.die()
            self.ended.set()

    terminate = kill

    def wait(self, timeout: float | None = None) -> int:
        del timeout
        assert self.returncode is not None, "nobody waits for a daemon that runs"
        return self.returncode


def _virtual_now_s() -> float:
    return asyncio.get_running_loop().time()


class VirtualDaemon(SupervisedStore):
    """Starts again whenever its process dies, or hangs for as long as the supervisor allows."""

    def __init__(self, store: SharedStore, troubles: Troubles) -> None:
        nothing: Any = None
        super().__init__(_NOWHERE, nothing, _NOWHERE, lambda: None, now_s=_virtual_now_s)
        self._store, self._troubles = store, troubles
        self._pids = itertools.count(20_000_000)
        self._daemons: dict[int, _Daemon] = {}

    def patches(self, set_attribute: Callable[[str, Any], None]) -> None:
        """Let the supervisor's module see this machine."""
        set_attribute("wait_ended", self._wait_ended)
        set_attribute("in_daemon_thread", self._in_daemon_thread)
        set_attribute("fetch_stats", self._fetch_stats)

    def kill(self) -> None:
        """The daemon dies."""
        self._daemons[self.pid].kill()

    def _spawn(self, ready_fd: int) -> Any:
        daemon = _Daemon(next(self._pids), self._store, ready_fd)
        self._daemons[daemon.pid] = daemon
        return daemon

    async def _until_written(self, _: int, process: Any) -> None:
        await asyncio.sleep(self._troubles.some_s(1.0))
        if self._troubles.happen(0.2):
            process.kill()
        elif self._store.is_away:
            self._store.start()
        if process.returncode is None:
            os.write(process.ready_fd, b"ready")
        os.close(process.ready_fd)

    async def _wait_ended(self, pid: int) -> None:
        await self._daemons[pid].ended.wait()

    async def _in_daemon_thread(self, work: Callable[[], T]) -> T:
        if self._store.is_hung:
            await asyncio.sleep(self._timeouts.answer_s)
            if self._store.is_hung:
                raise StoreUnavailableError("it does not answer")
        await asyncio.sleep(self._troubles.some_s(0.1))
        return work()

    def _fetch_stats(self, _: Path, __: float = 0.0) -> object:
        if self._store.is_away:
            raise StoreUnavailableError("nobody listens there")
        return self._store.service.stats()

    def _last_line(self) -> str:
        return "it died"
