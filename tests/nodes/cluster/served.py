"""A server in a network of hosts, and what is asked of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

import small_model
from banaserve.base.access.key_files import CLUSTER_KEY_VARIABLE
from banaserve.base.platform.run_dir import find_admin
from banaserve.contracts.control_api import ServerStatus
from banaserve.contracts.migration_api import Migration, MoveLayers, Return
from banaserve.frontdoor.admin_client import AdminClient
from benchmarks.network.hosts import Host
from server_run import Run
from streams import Answer, Kind, asked_all

LIGHT = ("--kv-store-size", "256MiB", "--kv-cache-memory-bytes", str(256 << 20))
OPTIONS = (*LIGHT, "--dtype", "float32", "--max-model-len", "2048")
PORT = 8000
StartServer = Callable[[Host, Path, tuple[str, ...], Mapping[str, str]], Run]
"""Starts a server on a host: with a folder for its logs, options and variables."""


def start_server(host: Host, folder: Path, words: tuple[str, ...], env: Mapping[str, str]) -> Run:
    """Start a server with real engines."""
    options = (*small_model.options(), *OPTIONS, *words)
    return Run(folder, PORT, options, env, None, host.command)


class Served:
    """A server whose front door is on ``front``.

    Args:
        start: Starts it.

    Attributes:
        run: The server.
    """

    def __init__(
        self,
        front: Host,
        folder: Path,
        words: tuple[str, ...],
        key: str = "",
        start: StartServer = start_server,
    ) -> None:
        folder.mkdir()
        self._front = front
        self.run = start(front, folder, words, {CLUSTER_KEY_VARIABLE: key} if key else {})

    def wait(self) -> None:
        self.run.wait_for("Ctrl-C ends it.")

    def asked(
        self, kinds: dict[str, Kind], seen: Callable[[Answer], None] = lambda _: None
    ) -> list[list[int]]:
        """Tokens of the answers; ``seen`` gets what has come of each at each of its chunks.

        Raises:
            AssertionError: One has failed.
        """
        answers = self._front.inside(lambda: asyncio.run(asked_all(self.run, kinds, seen))).values()
        assert [answer.error for answer in answers] == [""] * len(answers)
        return [answer.tokens[0] for answer in answers]

    def metric(self, name: str, **labels: str) -> float:
        return self._front.inside(lambda: self.run.metric(name, **labels))

    def is_ready(self, instance_id: str) -> bool:
        return self.metric("banaserve_instance_ready", instance_id=instance_id) == 1

    def status(self) -> ServerStatus:
        admin = AdminClient(*find_admin(self.run.run_dir))
        return self._front.inside(admin.status)

    def migrated(self, ask: MoveLayers | Return) -> Migration:
        admin = AdminClient(*find_admin(self.run.run_dir))
        return self._front.inside(lambda: admin.run(ask))
