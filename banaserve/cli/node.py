"""``banaserve node``: give this machine to a server that runs elsewhere."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from banaserve.access.key_files import key_of
from banaserve.cli.console import timed
from banaserve.cli.quiet import quiet
from banaserve.net.addresses import host_and_port
from banaserve.net.descriptors import raise_descriptor_limit
from banaserve.nodes.options import KEY_VARIABLE, key_from_environment
from banaserve.platform.processes import die_with_parent
from banaserve.run_dir import open_run_dir

if TYPE_CHECKING:
    from banaserve.nodes.agent import NodeAgent

app = typer.Typer(name="node", help="Run engines of a server elsewhere.", add_completion=False)


@app.command()
def node(
    listen: Annotated[
        str,
        typer.Option(help="Where the server reaches this node.", metavar="HOST:PORT"),
    ],
    cluster_key_file: Annotated[
        Path | None,
        typer.Option(
            help=f"Holds the key that this node and its server share; {KEY_VARIABLE}.",
            metavar="FILE",
        ),
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(help="Where logs go (a fresh folder under the state directory)."),
    ] = None,
    ready_fd: Annotated[int, typer.Option(hidden=True)] = -1,
    die_with: Annotated[int, typer.Option(hidden=True)] = 0,
) -> None:
    """Run engines, guests and a store for one server at a time, until Ctrl-C.

    Anyone who knows the key can run code on this machine, as on the server's own.
    """
    from banaserve.nodes.agent import NodeAgent
    from banaserve.nodes.credentials import ClusterCredentials

    if die_with:
        die_with_parent(die_with)
    host, port = host_and_port("--listen", listen, least_port=0)
    key = key_of("--cluster-key", None, cluster_key_file, key_from_environment())
    credentials = ClusterCredentials.of(key)
    raise_descriptor_limit()
    with open_run_dir(run_dir) as run, quiet(run.logs / "node.log") as terminal:
        agent = NodeAgent(credentials, run, timed(terminal))
        asyncio.run(_until_stopped(agent, host, port, ready_fd))


async def _until_stopped(agent: NodeAgent, host: str, port: int, ready_fd: int) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)

    def tell(port: int) -> None:
        if ready_fd >= 0:
            os.write(ready_fd, f"{port}\n".encode())
            os.close(ready_fd)

    await agent.serve(host, port, stop, tell)
