"""Process on the server's machine that stands for a process on a node.

The shim lives as long as the remote process, ends the remote process with itself, and relays its
sockets and its log. So the code that starts, watches and kills engines by their process ids need
not know where they run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import msgspec

from banaserve.base.errors import BanaServeError
from banaserve.base.platform.processes import die_with_parent, show_life, spawn_module
from banaserve.nodes import messages
from banaserve.nodes.credentials import ClusterCredentials
from banaserve.nodes.link import NodeLink, NodeLostError, connect
from banaserve.nodes.relay import Relay


class ShimLaunch(msgspec.Struct, frozen=True):
    """Request that a shim reads from its standard input.

    Attributes:
        host, port: Address of the node's agent.
        key: Key of the cluster.
        order: Order that names the process to run on the node.
        targets: Paths of Unix sockets here, by the name suffixes of the sockets on the node.
    """

    host: str
    port: int
    key: str
    order: messages.JoinSession
    targets: dict[str, str]


def start(launch: ShimLaunch, log_path: Path) -> subprocess.Popen[bytes]:
    """Start a shim; its log and that of the process for which it stands go to ``log_path``.

    Raises:
        OSError: The system has no resources for another process.
    """
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        said = msgspec.json.encode(launch)
        return spawn_module(__name__, (str(os.getpid()),), said, os.environ, output=log)
    finally:
        os.close(log)


def main() -> int:
    """Stand for a process until it has ended; the exit code is not that of the process."""
    die_with_parent(int(sys.argv[1]))
    life = show_life()
    launch = msgspec.json.decode(sys.stdin.buffer.read(), type=ShimLaunch)
    try:
        asyncio.run(_stand_for(launch, life))
    except (BanaServeError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


async def _stand_for(launch: ShimLaunch, life: threading.Event) -> None:
    link = await connect(launch.host, launch.port, ClusterCredentials.of(launch.key))
    relay = Relay(link)
    try:
        await link.send(launch.order)
        await _follow(link, relay, launch.targets, life)
    finally:
        await relay.close()
        await link.close()


async def _follow(
    link: NodeLink, relay: Relay, targets: dict[str, str], life: threading.Event
) -> None:
    while True:
        match said := await link.receive():
            case messages.Data():
                await relay.took(said)
            case messages.LogWritten(written):
                with contextlib.suppress(OSError):  # a full disk takes the log, not the engine
                    os.write(2, written)
            case messages.ChannelOpened():
                await relay.opened(said, targets)
            case messages.ChannelClosed():
                relay.closed(said)
            case messages.ProcessDying():
                life.set()
            case messages.ProcessEnded():
                return
            case _:
                raise NodeLostError(f"{link.peer} has sent a {type(said).__name__}")


if __name__ == "__main__":
    sys.exit(main())
