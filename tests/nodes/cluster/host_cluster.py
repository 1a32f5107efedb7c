"""A server in a network of hosts: its front door on one, an agent for its engines on each other."""

from __future__ import annotations

import itertools
from pathlib import Path

from banaserve.kvstore.admin import fetch_stats
from banaserve.kvstore.stats import StoreStats
from benchmarks.network.hosts import Host, Network
from node_run import NodeRun
from served import Served

KEY, PORT = "a-key-of-a-cluster-of-hosts", 7300


class Cluster:
    """A server on the first host, and an agent on each of the others.

    Attributes:
        nodes: By host, in the hosts' order.
    """

    def __init__(self, network: Network, folder: Path) -> None:
        self.network = network
        self.front, *self.others = network.hosts[:-1]
        self.stranger = network.hosts[-1]
        self.nodes: dict[str, NodeRun] = {}
        self._folder = folder
        self._served: Served | None = None
        self._numbers = itertools.count()

    def start_node(self, host: Host) -> None:
        folder = self._folder / f"node-{host.address}-{next(self._numbers)}"
        self.nodes[host.address] = NodeRun(folder, f"{host.address}:{PORT}", KEY, host.command)

    def start(self, *options: str) -> None:
        for host in self.others:
            self.start_node(host)
        for node in self.nodes.values():
            node.wait_for("takes a server's engines")
        words = [word for node in self.nodes.values() for word in ("--node", node.address)]
        self._served = Served(self.front, self._folder / "serve", (*options, *words), KEY)
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
