"""A server in a network of hosts: its front door on one, an agent for its engines on each other."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

from banaserve.kvstore.client.admin import fetch_stats
from banaserve.kvstore.stats import StoreStats
from benchmarks.network.hosts import Host, Network
from node_run import NodeRun
from served import Served, StartServer, start_server

KEY, PORT = "a-key-of-a-cluster-of-hosts", 7300
StartNode = Callable[[Host, Path, str], NodeRun]
"""Starts an agent on a host: with a folder for its logs, and its address."""


def start_node(host: Host, folder: Path, address: str) -> NodeRun:
    """Start an agent whose engines are real."""
    return NodeRun(folder, address, KEY, host.command)


class Cluster:
    """A server on the first host, and an agent on each of the others.

    Args:
        start_agent: Starts the agent of a host.
        start_front: Starts the server.

    Attributes:
        nodes: By host, in the hosts' order.
    """

    def __init__(
        self,
        network: Network,
        folder: Path,
        start_agent: StartNode = start_node,
        start_front: StartServer = start_server,
    ) -> None:
        self.network = network
        self.front, *self.others = network.hosts[:-1]
        self.stranger = network.hosts[-1]
        self.nodes: dict[str, NodeRun] = {}
        self._folder = folder
        self._start_agent, self._start_front = start_agent, start_front
        self._served: Served | None = None
        self._numbers = itertools.count()

    def start_node(self, host: Host) -> None:
        folder = self._folder / f"node-{host.address}-{next(self._numbers)}"
        self.nodes[host.address] = self._start_agent(host, folder, f"{host.address}:{PORT}")

    def start(self, *options: str) -> None:
        for host in self.others:
            self.start_node(host)
        for node in self.nodes.values():
            node.wait_for("takes a server's engines")
        words = [word for node in self.nodes.values() for word in ("--node", node.address)]
        folder, words = self._folder / "serve", [*options, *words]
        self._served = Served(self.front, folder, tuple(words), KEY, self._start_front)
        self._served.wait()

    def store_of(self, host: Host) -> StoreStats:
        """What the store of an agent's server says, asked on its own socket."""
        [socket_path] = self.nodes[host.address].temp_dir.glob("banaserve-*/n*/kv")
        return fetch_stats(socket_path)

    @property
    def served(self) -> Served:
        assert self._served is not None
        return self._served

    def close(self) -> None:
        if self._served is not None:
            self._served.run.close()
        for node in self.nodes.values():
            node.close()
