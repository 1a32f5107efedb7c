"""Master of Mooncake Store that a test starts for itself."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from banaserve.base.errors import UserError
from banaserve_bench.loadgen.servers import end_with_parent, free_port
from banaserve_mooncake.config import check_installed
from banaserve_mooncake.tier import MooncakeTier
from waiting import eventually

_START_TIMEOUT_S = 30.0


class Peer:
    """A server process on a port of 127.0.0.1 that may be ended and started again there."""

    def __init__(self, command: list[str], port: int) -> None:
        self.port = port
        self._command = command
        self.start()

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    def start(self) -> None:
        """Start the process and return when it accepts connections."""
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        eventually(lambda: self._process.poll() is not None or self._accepts(), self._command[0])
        assert self._process.poll() is None, f"{self._command[0]} ended"

    def _accepts(self) -> bool:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", self.port)).close()
            return True
        return False

    def pause(self) -> None:
        """Stop the process with its connections open; return when it has stopped."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)

    def resume(self) -> None:
        """Undo ``pause``."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the process and wait for its end."""
        self._process.kill()
        self._process.wait()


def missing_mooncake() -> str | None:
    """Return the reason why Mooncake cannot be used here; None if it can."""
    try:
        check_installed()
    except UserError as error:
        return str(error)
    return None


def joined_mooncake(master: Peer, options: str) -> MooncakeTier:
    """Return a tier that has joined ``master``; ``options`` are those of its URL.

    Raises:
        UserError: The tier cannot join; the message says why.
    """
    tier = MooncakeTier.from_url(f"mooncake://127.0.0.1:{master.port}?{options}")
    until_s = time.monotonic() + 2 * _START_TIMEOUT_S
    while not tier.stats().available:
        left_s = until_s - time.monotonic()
        if left_s <= 0 or not select.select([tier.fd], [], [], left_s)[0]:
            problem = tier.stats().problem
            tier.close()
            raise UserError(f"Mooncake did not start: {problem}")
        tier.poll()
    return tier


@contextlib.contextmanager
def mooncake_master() -> Iterator[Peer]:
    """Run a master of Mooncake Store on free ports of the loopback."""
    spec = find_spec("mooncake")
    if spec is None or spec.origin is None:
        raise UserError("Mooncake is not installed: pip install './plugins/mooncake[client]'")
    port = free_port()
    command = [str(Path(spec.origin).with_name("mooncake_master")), f"--rpc_port={port}"]
    command += ["--rpc_address=127.0.0.1", "--rpc_thread_num=2"]
    command += ["--metrics_host=127.0.0.1", f"--metrics_port={free_port()}"]
    peer = Peer(command, port)
    try:
        yield peer
    finally:
        peer.kill()
