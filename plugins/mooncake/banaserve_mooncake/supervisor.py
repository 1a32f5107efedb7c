"""Supervisor of Mooncake's process, which also finds out whether the store can be used."""

from __future__ import annotations

import contextlib
import logging
import selectors
import time
from collections.abc import Callable

from banaserve.base.errors import ProtocolError
from banaserve_mooncake.child import MooncakeChild
from banaserve_mooncake.config import MooncakeConfig
from banaserve_mooncake.events import Health
from banaserve_mooncake.process import (
    AskPresent,
    Call,
    Leave,
    OperationDone,
    OperationRefused,
    ProcessReady,
)

log = logging.getLogger(__name__)

PAUSE_S = 1.0
"""Interval between two questions to the master, and maximum wait before a check, in seconds."""
_PING_KEY = b"\0" * 16
_FIRST_RESTART_S = 0.2
_LONGEST_RESTART_S = 5.0
_JOIN_TIMEOUT_S = 30.0
_LEAVE_TIMEOUT_S = 2.0


class MooncakeSupervisor:
    """Supervisor that restarts the process with growing pauses and asks the master every second.

    One thread calls all methods.

    Args:
        config: Configuration with which to join the store.
        staging_fd: File descriptor of the memory shared with the process.
        selector: Selector; the data of its keys are functions to call.
        on_done: Callback with the number and the codes of each call that has been answered.
        on_lost: Callback when the process is dead: no call that was sent will be answered.
        on_health: Callback when the store becomes unavailable or available again.
    """

    def __init__(
        self,
        config: MooncakeConfig,
        staging_fd: int,
        selector: selectors.BaseSelector,
        *,
        on_done: Callable[[int, list[int]], None],
        on_lost: Callable[[], None],
        on_health: Callable[[Health], None],
    ) -> None:
        self.health = Health(False, f"joining mooncake_master at {config.master}")
        self._config = config
        self._away = f"mooncake_master at {config.master} does not answer"
        self._staging_fd = staging_fd
        self._selector = selector
        self._on_done = on_done
        self._on_lost = on_lost
        self._on_health = on_health
        self._child: MooncakeChild | None = None
        self._started_s = 0.0
        self._restart_at_s = 0.0
        self._restart_pause_s = _FIRST_RESTART_S
        self._ping_seq: int | None = None
        self._ping_at_s = 0.0
        self._last_seq = 0

    def next_seq(self) -> int:
        """Return the number of the next call."""
        self._last_seq += 1
        return self._last_seq

    def send(self, call: Call) -> None:
        """Send a call to the process. If it is gone, ``on_lost`` is called before the return."""
        child = self._child
        if child is None:
            self.lose("Mooncake's client is gone: it has ended")
            return
        try:
            child.send(call)
        except (BrokenPipeError, ConnectionResetError):
            self.lose(f"Mooncake's client has ended ({child.exit_reason()})")
        except OSError as error:
            self.lose(f"Mooncake's client is gone: {error}")

    def due_s(self) -> float:
        """Return the time at which ``look_after`` must be called, on the monotonic clock."""
        soon_s = time.monotonic() + PAUSE_S
        if self._child is None:
            return min(soon_s, self._restart_at_s)
        is_due = self._child.is_ready and self._ping_seq is None
        return min(soon_s, self._ping_at_s) if is_due else soon_s

    def look_after(self) -> None:
        """Start the process, ask the master, or give up waiting, depending on what is due."""
        now_s = time.monotonic()
        if self._child is None:
            if now_s >= self._restart_at_s:
                self._start()
        elif not self._child.is_ready:
            if now_s - self._started_s > max(_JOIN_TIMEOUT_S, self._config.timeout_s):
                self.lose(self._away)
        elif self._ping_seq is None:
            if now_s >= self._ping_at_s:
                self._ping_seq, self._ping_at_s = self.next_seq(), now_s
                self.send(AskPresent(self._ping_seq, [_PING_KEY]))
        elif now_s - self._ping_at_s > self._config.timeout_s:
            self._note(Health(False, self._away))

    def doubt(self) -> None:
        """Ask the master soon, because a call has failed."""
        if self._ping_seq is None:
            self._ping_at_s = min(self._ping_at_s, time.monotonic())

    def lose(self, problem: str) -> None:
        """Kill the process and plan its restart."""
        child, self._child = self._child, None
        if child is not None:
            for fd in (child.sock, child.log_fd):
                if fd in self._selector.get_map():
                    self._selector.unregister(fd)
            child.end()
        self._ping_seq = None
        self._restart_at_s = time.monotonic() + self._restart_pause_s
        self._restart_pause_s = min(2 * self._restart_pause_s, _LONGEST_RESTART_S)
        self._note(Health(False, problem))
        self._on_lost()

    def leave(self) -> None:
        """Let the process leave the master, within two seconds, and end it."""
        if self._child is None:
            return
        if self.health.available:
            with contextlib.suppress(OSError):
                self._child.send(Leave())
        self._child.end(_LEAVE_TIMEOUT_S if self.health.available else 0.0)

    def _start(self) -> None:
        self._started_s = time.monotonic()
        try:
            child = MooncakeChild(self._config, self._staging_fd)
        except OSError as error:
            self.lose(f"cannot start Mooncake's client: {error}")
            return
        self._child = child
        self._selector.register(child.sock, selectors.EVENT_READ, self._on_report)
        self._selector.register(child.log_fd, selectors.EVENT_READ, self._on_log)

    def _on_log(self) -> None:
        if self._child is not None and not self._child.read_log():
            self._selector.unregister(self._child.log_fd)

    def _on_report(self) -> None:
        child = self._child
        if child is None:
            return
        try:
            for report in child.receive():
                match report:
                    case ProcessReady():
                        child.is_ready, self._ping_at_s = True, 0.0
                    case OperationRefused(reason):
                        self.lose(reason)
                        return
                    case OperationDone(seq, codes) if seq == self._ping_seq:
                        self._on_pong(codes)
                    case OperationDone(seq, codes):
                        self._on_done(seq, codes)
        except (EOFError, OSError, ProtocolError, LookupError) as error:
            reason = child.exit_reason() if isinstance(error, EOFError | OSError) else repr(error)
            self.lose(f"Mooncake's client has ended ({reason})")

    def _on_pong(self, codes: list[int]) -> None:
        self._ping_seq = None
        self._ping_at_s = time.monotonic() + PAUSE_S
        if codes[0] < 0:
            self._note(Health(False, f"{self._away} (code {codes[0]})"))
            return
        self._restart_pause_s = _FIRST_RESTART_S
        self._note(Health(True, ""))

    def _note(self, health: Health) -> None:
        if health == self.health:
            return
        if health.available:
            log.info("joined mooncake_master at %s", self._config.master)
        elif self.health.available:
            log.warning("going on without Mooncake: %s", health.problem)
        self.health = health
        self._on_health(health)
