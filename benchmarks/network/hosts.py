"""Hosts of a small network on this machine. Needs root and ``ip``.

The hosts are network namespaces around a switch, each with its own ``/dev/shm``.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

_NET, _BRIDGE = "10.77.0", "sw0"
_TICKS_PER_S = 250
_CLONE_NEWNET = 0x40000000
T = TypeVar("T")
_OWN_SHM = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'


def missing() -> str:
    """Return the reason why there can be no hosts here; empty if there can."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("unshare") is None:
        return "needs root, ip (Debian: iproute2) and unshare"
    name = f"bt{os.getpid()}-try"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
        return "this machine allows no new network namespaces"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return ""


class Host:
    """A host of the network.

    Attributes:
        address: IP address of the host.
    """

    def __init__(self, namespace: str, address: str, port: str) -> None:
        self.namespace, self.address = namespace, address
        self._port = port

    def command(self, argv: Sequence[str]) -> list[str]:
        """Return the command that runs ``argv`` on this host, in the very process it starts."""
        inside = ["unshare", "-m", "sh", "-c", _OWN_SHM, "_", *argv]
        return ["ip", "netns", "exec", self.namespace, *inside]

    def inside(self, work: Callable[[], T]) -> T:
        """Return the result of ``work`` in a thread whose sockets are this host's."""

        def enter() -> T:
            with Path(f"/run/netns/{self.namespace}").open() as namespace:
                if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")
            return work()

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(enter).result()


class Network:
    """Hosts on one switch.

    Attributes:
        hosts: Hosts, all of which reach each other.
    """

    def __init__(self, num_hosts: int) -> None:
        self._name = f"bt{os.getpid()}"
        self._switch = f"{self._name}-s"
        self._namespaces = [self._switch]
        _ip("netns", "add", self._switch)
        self.hosts: list[Host] = []
        try:
            self._in_switch("link", "add", "name", _BRIDGE, "type", "bridge")
            self._in_switch("link", "set", _BRIDGE, "up")
            self.hosts += [self._add(number) for number in range(num_hosts)]
        except BaseException:
            self.close()
            raise

    def cut(self, host: Host) -> None:
        """Drop everything that is sent to a host or by it."""
        self._in_switch("link", "set", host._port, "down")

    def mend(self, host: Host) -> None:
        self._in_switch("link", "set", host._port, "up")

    def slow_down(self, host: Host, rate: str) -> None:
        """Limit the sending rate of a host permanently, to a rate such as ``1gbit``."""
        self._shape(host, rate, "32kb")

    def limit(self, host: Host, bits_per_s: float) -> None:
        """Limit the sending rate, with a bucket for the bytes between two ticks of the kernel."""
        burst_bytes = max(128 << 10, int(bits_per_s / 8 / _TICKS_PER_S))
        self._shape(host, f"{bits_per_s:.0f}bit", str(burst_bytes))

    def _shape(self, host: Host, rate: str, burst: str) -> None:
        tbf = ("tbf", "rate", rate, "burst", burst, "latency", "200ms")
        command = ["tc", "-n", host.namespace, "qdisc", "replace", "dev", "eth0", "root", *tbf]
        subprocess.run(command, check=True, capture_output=True)

    def close(self) -> None:
        for name in self._namespaces:
            with suppress(subprocess.CalledProcessError):
                _ip("netns", "del", name)

    def _add(self, number: int) -> Host:
        namespace, port = f"{self._name}-h{number}", f"p{number}"
        address = f"{_NET}.{number + 1}"
        _ip("netns", "add", namespace)
        self._namespaces.append(namespace)
        veth = ("type", "veth", "peer", "name", "eth0", "netns", namespace)
        self._in_switch("link", "add", "name", port, *veth)
        self._in_switch("link", "set", port, "master", _BRIDGE, "up")
        _ip("-n", namespace, "addr", "add", f"{address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip("-n", namespace, "link", "set", device, "up")
        return Host(namespace, address, port)

    def _in_switch(self, *words: str) -> None:
        _ip("-n", self._switch, *words)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
