"""Servers and agents with mock engines on the hosts of a network."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from benchmarks.network.hosts import Host
from fork_server import ForkServer
from host_cluster import KEY
from mock_facts import HOST_VARIABLE, MockOptions
from mock_run import MockRun, mock_node, mock_run
from node_run import NodeRun
from served import PORT


class MockHosts:
    """Starts them.

    Args:
        mocks: Times of all mock cores.
    """

    def __init__(self, forks: ForkServer, mocks: MockOptions) -> None:
        self._forks = forks
        self._mocks = mocks

    def node(self, host: Host, folder: Path, address: str) -> NodeRun:
        """Start an agent; returns at once."""
        env = {HOST_VARIABLE: host.namespace}
        return mock_node(folder, address, KEY, self._mocks, self._forks, env)

    def server(
        self, host: Host, folder: Path, words: tuple[str, ...], env: Mapping[str, str]
    ) -> MockRun:
        """Start a server; returns at once."""
        env = {**env, HOST_VARIABLE: host.namespace}
        return mock_run(folder, self._forks, *words, mocks=self._mocks, port=PORT, env=env)
