"""``banaserve serve`` and ``banaserve node`` with mock engines; all else is the real thing.

Usage: as ``python -m banaserve``, with ``tests/mock_engine`` in PYTHONPATH. A forked process
goes to a host of a test's network itself: ``ip netns exec`` cannot start it there.
"""

from __future__ import annotations

import ctypes
import os
import socket
from pathlib import Path

from banaserve.cli.serve import launch as serve_launch
from banaserve.kvstore.daemon.supervised import StoreTimeouts, SupervisedStore
from banaserve.serving.instances import probe
from banaserve.serving.launch import launcher, messages
from banaserve.serving.launch.launcher import ForkLauncher
from banaserve.serving.launch.parent_link import ORDER_S, ParentLink, start_parent
from mock_facts import HOST_VARIABLE, MockOptions

_CLONE_NEWNS, _CLONE_NEWNET = 0x00020000, 0x40000000
_MS_REC, _MS_PRIVATE = 1 << 14, 1 << 18


def mock_launcher(argv: list[str]) -> ForkLauncher:
    """Launcher of mock cores, which one small parent forks."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = messages.spawn(
            messages.ParentLaunch(argv, theirs.fileno()),
            os.environ,
            pass_fds=(theirs.fileno(),),
            in_session=True,
        )
    return ForkLauncher(ParentLink(ours, process.pid, process), lambda: start_parent(argv))


def mock_engines() -> None:
    """Let this process, and all that it starts, start mock cores in place of engines."""
    messages._MODULE = "mock_parent"
    serve_launch._fork_launcher = lambda argv, _config: mock_launcher(argv)
    options = MockOptions.read()
    serve_launch._instance_bytes = lambda *_: options.instance_bytes
    if options.patience != 1.0:
        set_patience(options.patience)


def set_patience(share: float) -> None:
    """Set the share of the usual time for which what says nothing is borne with."""
    usual = StoreTimeouts()
    told = {name: share * getattr(usual, name) for name in StoreTimeouts.__slots__}
    begin = SupervisedStore.__init__
    begin.__defaults__ = tuple(
        StoreTimeouts(**told) if one == usual else one for one in begin.__defaults__ or ()
    )
    ParentLink.order.__defaults__ = (share * ORDER_S,)
    launcher.ORDER_S *= share
    probe._PROBE_TIMEOUT_S *= share


def enter(namespace: str) -> None:
    """Go to a host: its network and a ``/dev/shm`` of its own, as ``Host.command`` gives."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(f"/run/netns/{namespace}").open() as network:
        _check(libc.setns(network.fileno(), _CLONE_NEWNET))
    _check(libc.unshare(_CLONE_NEWNS))
    _check(libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None))
    _check(libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, None))


def _check(failed: int) -> None:
    if failed:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


if __name__ == "__main__":
    if host := os.environ.pop(HOST_VARIABLE, ""):
        enter(host)
    mock_engines()
    from banaserve.__main__ import run

    run()
