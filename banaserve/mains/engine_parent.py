"""Engine parent: a process with all imports done that forks engine cores and guests.

Imports take most of an engine core's start time. The first engine parent is forked from the front
door before the front door has threads; later ones are started as new processes.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable

from banaserve.base.platform.fail_points import FailPoint, reach
from banaserve.base.platform.processes import die_with_parent
from banaserve.engine.compat.config import VllmConfig
from banaserve.engine.compat.engine import PRE_IMPORTED, override_kernels
from banaserve.engine.engine_args import engine_config, load_parsers, parse_vllm_argv
from banaserve.mains.engine import redirect_output, run_order
from banaserve.serving.launch import messages

_PRE_IMPORTED = (
    *PRE_IMPORTED,
    "banaserve.engine.connector.connector",
    "banaserve.migration.guest.server",
    "banaserve.migration.host.install",
    "banaserve.mains.worker",
)


def pre_import() -> None:
    """Import an engine core's modules on CPU and install its kernels, before any thread or fork."""
    for name in _PRE_IMPORTED:
        importlib.import_module(name)
    override_kernels()


def fork_engine_parent(config: VllmConfig) -> tuple[int, socket.socket]:
    """Fork the parent of all engine cores; call before the caller starts any thread.

    Returns:
        The parent's process id, and the caller's end of the socket that the parent takes orders
        from. When the caller's end closes, the parent kills its engines and exits.
    """
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid:
        theirs.close()
        return pid, ours
    ours.close()
    _in_child(lambda: run_engine_parent(config, theirs))
    raise AssertionError("a forked child never returns")


def run_engine_parent(config: VllmConfig, control: socket.socket) -> None:
    """Run this process as the parent of engines and guests until ``control`` closes."""
    _EngineParent(config, control).run()


def run_launched(launch: messages.ParentLaunch) -> None:
    """Run this process as the engine parent that ``launch`` describes."""
    control = socket.socket(fileno=launch.control)
    args = parse_vllm_argv(launch.vllm_argv)
    config = engine_config(args)
    load_parsers(args)
    pre_import()
    messages.send(control, messages.ParentReady())
    run_engine_parent(config, control)


def _in_child(body: Callable[[], None]) -> None:
    """Run ``body`` and end the process: a forked child never returns to its caller's code."""
    status = 1
    try:
        body()
        status = 0
    except SystemExit as ending:
        status = ending.code if isinstance(ending.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _is_late(order: messages.Message) -> bool:
    """Return whether the order's time has passed: its sender has sent it to another parent then.

    That happens if this parent was stopped for a while.
    """
    until_s = order.until_s if isinstance(order, messages.Order) else 0.0
    return bool(until_s) and time.monotonic() > until_s


class _EngineParent:
    """Parent of engines and guests: starts them on request, reports starts, and reaps the ended.

    Single-threaded.
    """

    def __init__(self, config: VllmConfig, control: socket.socket) -> None:
        self._config = config
        self._control = control
        self._pids: set[int] = set()
        self._wake_read, self._wake_write = socket.socketpair()

    def run(self) -> None:
        self._own_signals()
        gc.freeze()  # or each engine's first full collection would copy every page
        selector = selectors.DefaultSelector()
        selector.register(self._control, selectors.EVENT_READ, self._obey)
        selector.register(self._wake_read, selectors.EVENT_READ, self._reap)
        try:
            while all(key.data() for key, _ in selector.select()):
                pass
        finally:
            for pid in self._pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _own_signals(self) -> None:
        """Set up signals: ignore a terminal's Ctrl-C, since the supervisor ends the engines."""
        die_with_parent()
        os.setpgid(0, 0)
        self._wake_write.setblocking(False)
        signal.set_wakeup_fd(self._wake_write.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _obey(self) -> bool:
        order = messages.receive(self._control)
        if order is None:
            return False
        if _is_late(order):
            return True
        reach(FailPoint.LAUNCHER_ORDER)
        if isinstance(order, messages.Order):
            parent_pid = os.getpid()
            try:
                pid = os.fork()
            except OSError as error:  # no room for another process: those that run go on
                print(f"{messages.name_of(order)} cannot be started: {error}", file=sys.stderr)
                return True
            if not pid:
                _in_child(lambda: self._become(order, parent_pid))
            self._pids.add(pid)
            messages.send(self._control, messages.Started(messages.name_of(order), pid))
        return True

    def _become(self, order: messages.Order, parent_pid: int) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        die_with_parent(parent_pid)
        for inherited in (self._control, self._wake_read, self._wake_write):
            inherited.close()
        redirect_output(order.log_path)
        reach(FailPoint.ENGINE_START)
        run_order(order, self._config)

    def _reap(self) -> bool:
        self._wake_read.recv(4096)
        while self._pids:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return True
            if pid == 0:
                return True
            self._pids.discard(pid)
        return True
