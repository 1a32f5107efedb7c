"""``banaserve node``: give this machine to a server that runs elsewhere."""

from __future__ import annotations

import asyncio
import os
import signal
from argparse import SUPPRESS
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from banaserve.base.access.key_files import CLUSTER_KEY_VARIABLE, key_option
from banaserve.base.arguments import option
from banaserve.base.net.addresses import host_and_port
from banaserve.base.net.sockets import raise_descriptor_limit
from banaserve.base.platform.processes import die_with_parent
from banaserve.base.platform.run_dir import open_run_dir
from banaserve.cli.app import App
from banaserve.cli.terminal.console import quiet, timed

if TYPE_CHECKING:
    from banaserve.nodes.agent.agent import NodeAgent


@dataclass(frozen=True, kw_only=True)
class AgentOptions:
    """Options of ``banaserve node``.

    Attributes:
        ready_fd: File descriptor that gets the port when the agent listens; -1 for none.
        die_with: Process with which the agent ends; 0 for none.
    """

    listen: str = option("where the server reaches this node", metavar="HOST:PORT")
    cluster_key: str = key_option(
        "--cluster-key",
        "",
        f"file with the key that this node and its server share (${CLUSTER_KEY_VARIABLE})",
        CLUSTER_KEY_VARIABLE,
    )
    run_dir: Path | None = option(
        "folder of logs (a new one below the state directory)", None, Path
    )
    ready_fd: int = option(SUPPRESS, -1)
    die_with: int = option(SUPPRESS, 0)


def node(asked: AgentOptions) -> None:
    """Run engines, guests and a store for one server at a time, until Ctrl-C.

    Anyone who knows the key can run code on this machine, as on the server's own.
    """
    from banaserve.nodes.agent.agent import NodeAgent
    from banaserve.nodes.credentials import ClusterCredentials

    if asked.die_with:
        die_with_parent(asked.die_with)
    host, port = host_and_port("--listen", asked.listen, least_port=0)
    credentials = ClusterCredentials.of(asked.cluster_key)
    raise_descriptor_limit()
    with open_run_dir(asked.run_dir) as run, quiet(run.logs / "node.log") as terminal:
        agent = NodeAgent(credentials, run, timed(terminal))
        asyncio.run(_until_stopped(agent, host, port, asked.ready_fd))


async def _until_stopped(agent: NodeAgent, host: str, port: int, ready_fd: int) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)

    def tell(port: int) -> None:
        if ready_fd >= 0:
            os.write(ready_fd, f"{port}\n".encode())
            os.close(ready_fd)

    await agent.serve(host, port, stop, tell)


app = App(node)
