"""Engines of a test that are mocks: what ``banaserve.mains.spawned`` is for real ones.

``python -m mock_parent PARENT_PID`` reads what it is to be from its standard input. A parent
forks mock cores on order, as the engine parent forks real ones: ten milliseconds and some megabytes
each.
"""

from __future__ import annotations

import gc
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence

import msgspec

import mock_core
from banaserve.base.platform.fail_points import FailPoint, reach
from banaserve.base.platform.processes import die_with_parent, show_life
from banaserve.serving.launch import messages

_READ_BYTES = 4096


def main() -> None:
    die_with_parent(int(sys.argv[1]))
    match launch := msgspec.json.decode(sys.stdin.buffer.read(), type=messages.Launch):
        case messages.StartEngine():
            become(launch.instance_id, launch.handshake_address, launch.log_path, launch.vllm_argv)
        case messages.ParentLaunch():
            control = socket.socket(fileno=launch.control)
            messages.send(control, messages.ParentReady())
            MockParent(launch.vllm_argv, control).run()
        case messages.StartGuest():
            sys.exit("a mock engine has no guests")


def become(instance_id: str, handshake_address: str, log_path: str, argv: Sequence[str]) -> None:
    """Be the mock core of an instance; what it prints goes into its log."""
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    reach(FailPoint.ENGINE_START)
    mock_core.serve(instance_id, handshake_address, argv, show_life)


class MockParent:
    """Forks mock cores on order.

    Args:
        argv: Options of engines that are ordered without options.
        control: Socket that orders come from; when it closes, all cores are killed.
    """

    def __init__(self, argv: Sequence[str], control: socket.socket) -> None:
        self._argv = argv
        self._control = control
        self._pids: set[int] = set()
        self._wake_read, self._wake_write = socket.socketpair()

    def run(self) -> None:
        os.setpgid(0, 0)
        self._wake_write.setblocking(False)
        signal.set_wakeup_fd(self._wake_write.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        gc.collect()
        gc.freeze()  # or the first collection of each core copies every page
        selector = selectors.DefaultSelector()
        selector.register(self._control, selectors.EVENT_READ, self._obey)
        selector.register(self._wake_read, selectors.EVENT_READ, self._reap)
        try:
            while all(key.data() for key, _ in selector.select()):
                pass
        finally:
            for pid in self._pids:
                os.kill(pid, signal.SIGKILL)

    def _obey(self) -> bool:
        order = messages.receive(self._control)
        if order is None:
            return False
        assert isinstance(order, messages.Order)
        if order.until_s and time.monotonic() > order.until_s:
            return True
        reach(FailPoint.LAUNCHER_ORDER)
        if isinstance(order, messages.StartEngine):
            pid = self._fork(lambda: self._become(order))
        else:
            pid = self._fork(lambda: sys.exit("a mock engine has no guests"))
        messages.send(self._control, messages.Started(messages.name_of(order), pid))
        return True

    def _become(self, order: messages.StartEngine) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for inherited in (self._control, self._wake_read, self._wake_write):
            inherited.close()
        argv = order.vllm_argv or self._argv
        become(order.instance_id, order.handshake_address, order.log_path, argv)

    def _fork(self, body: Callable[[], object]) -> int:
        parent_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            die_with_parent(parent_pid)
            end_after(body)
        self._pids.add(pid)
        return pid

    def _reap(self) -> bool:
        self._wake_read.recv(_READ_BYTES)
        for pid in list(self._pids):
            if os.waitpid(pid, os.WNOHANG)[0]:
                self._pids.discard(pid)
        return True


def end_after(body: Callable[[], object]) -> None:
    """Run ``body`` and end this process: a forked child never goes back to its caller's code."""
    code = 1
    try:
        body()
        code = 0
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
