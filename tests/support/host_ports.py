"""Open ports of the hosts of ``benchmarks/network/hosts.py``, and what answers there."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.network.hosts import Host

_SCAN = """
import socket, sys
for port in range(1, 65536):
    with socket.socket() as sock:
        if sock.connect_ex((sys.argv[1], port)) == 0:
            sock.settimeout(10.0)
            sock.sendall(b"GET / HTTP/1.1\\r\\n\\r\\n" + bytes(100))
            try:
                said = sock.recv(4096)
            except OSError:
                said = b""
            print(port, said.hex())
"""


def scanned(host: Host, address: str) -> dict[int, bytes]:
    """Return what each open port at ``address`` answers to a page request without a key."""
    command = host.command([sys.executable, "-c", _SCAN, address])
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = (line.partition(" ") for line in said.splitlines())
    return {int(port): bytes.fromhex(answer) for port, _, answer in found}


def listening(host: Host) -> set[tuple[str, int]]:
    """Return addresses and ports of listening TCP sockets."""
    command = ["ip", "netns", "exec", host.namespace, "cat", "/proc/net/tcp", "/proc/net/tcp6"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = set()
    for line in lines.splitlines():
        words = line.split()
        if len(words) > 3 and words[3] == "0A":
            address, _, port = words[1].partition(":")
            found.add((_dotted(address), int(port, 16)))
    return found


def _dotted(address: str) -> str:
    """Return an address of ``/proc/net/tcp`` in dotted form; of IPv6 the hexadecimal digits."""
    if len(address) != 8:
        return address
    return ".".join(str(int(address[at : at + 2], 16)) for at in (6, 4, 2, 0))
