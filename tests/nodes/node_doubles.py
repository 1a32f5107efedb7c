"""Agents of nodes in the test's process, a server's launcher of them, and scripts as engines."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from banaserve.base.net.addresses import written
from banaserve.base.platform.processes import is_running
from banaserve.base.platform.run_dir import RunDir
from banaserve.base.types import InstanceId, Role
from banaserve.kvstore.daemon.options import StoreOptions
from banaserve.migration.rpc.messages import GuestAddress
from banaserve.nodes.agent.agent import NodeAgent
from banaserve.nodes.agent.session import NodeSession
from banaserve.nodes.credentials import ClusterCredentials
from banaserve.nodes.places import GivenPlaces
from banaserve.nodes.server.assignment import InstanceNeed
from banaserve.nodes.server.launcher import NodesLauncher
from banaserve.nodes.server.pool import NodeWork
from banaserve.serving.launch.messages import Order, StartEngine

KEY = "a-key-of-a-cluster"
ENGINE = """
import os, socket, sys
print("engine", os.getpid(), flush=True)
sock = socket.socket(socket.AF_UNIX)
sock.connect(sys.argv[1])
sock.sendall(b"HELLO")
while said := sock.recv(100):
    print(said.decode(), flush=True)
    if said == b"end":
        raise SystemExit("SomeError: asked to end")
    sock.sendall(said.upper())
"""
STANDS_STILL = "import signal; signal.alarm(600); signal.pause()"


class Scripts:
    """A node's launcher whose engines are scripts.

    Attributes:
        pids: Of all that it has started.
        released: Instances whose devices are free again.
    """

    def __init__(self) -> None:
        self.pids: list[int] = []
        self.released: list[str] = []
        self.argv: list[tuple[str, ...]] = []
        self.addresses: list[GuestAddress] = []

    def reserve(self, instance_id: str) -> None:
        """Scripts need no devices."""

    def release(self, instance_id: str) -> None:
        self.released.append(instance_id)

    async def start(self, order: Order) -> int:
        log = Path(order.log_path)
        if isinstance(order, StartEngine):
            self.argv.append(order.vllm_argv)
            return self._run(log, ENGINE, order.handshake_address.removeprefix("ipc://"))
        self.addresses.append(order.address)
        return self._run(log, STANDS_STILL)

    def _run(self, log: Path, *arguments: str) -> int:
        with log.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-c", *arguments], stdout=output, stderr=output
            )
        self.pids.append(process.pid)
        return process.pid

    def close(self) -> None:
        for pid in self.pids:
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)


@dataclass
class Node:
    """An agent that runs in this process."""

    port: int
    stop: asyncio.Event
    serving: asyncio.Task[None]
    said: list[str]
    host: str = "127.0.0.1"

    @property
    def address(self) -> str:
        return written(self.host, self.port)

    async def end(self) -> None:
        self.stop.set()
        await self.serving


async def start_node(folder: Path, port: int = 0, key: str = KEY, host: str = "127.0.0.1") -> Node:
    said: list[str] = []
    stop, opened = asyncio.Event(), asyncio.get_running_loop().create_future()
    agent = NodeAgent(ClusterCredentials.of(key), RunDir(folder, folder), said.append)
    serving = asyncio.create_task(agent.serve(host, port, stop, opened.set_result))
    return Node(await opened, stop, serving, said, host)


def patched(monkeypatch: pytest.MonkeyPatch) -> Scripts:
    """Let nodes run scripts; they set variables when they are prepared."""
    made = Scripts()

    async def make(*_: object) -> Scripts:
        return made

    monkeypatch.setattr(NodeSession, "_make_launcher", make)
    for name in ("OMP_NUM_THREADS", "BANASERVE_STORE_SOCKET"):
        monkeypatch.delenv(name, raising=False)  # a node that is prepared sets them
        monkeypatch.setenv(name, "1")
    return made


def launcher_of(
    *nodes: Node, server: str = "the server", store: StoreOptions | None = None
) -> NodesLauncher:
    work = NodeWork(
        instances=[(InstanceId("p0"), Role.PREFILL), (InstanceId("d0"), Role.DECODE)],
        need=InstanceNeed(),
        vllm_argv=("--model", "small"),
        forks=True,
        threads=1,
        store=store,
    )
    places = GivenPlaces([node.address for node in nodes])
    return NodesLauncher(places, KEY, work, server)


@asynccontextmanager
async def opened(
    *nodes: Node, server: str = "the server", store: StoreOptions | None = None
) -> AsyncIterator[NodesLauncher]:
    launcher = launcher_of(*nodes, server=server, store=store)
    try:
        await launcher.open(lambda _: None)
        yield launcher
    finally:
        await launcher.leave()
        launcher.close()


class Front:
    """The server's end of one engine's sockets."""

    def __init__(self, folder: Path, instance_id: str = "d0") -> None:
        self.stem = folder / f"{instance_id}.1"
        self.address = f"ipc://{self.stem}.h"
        self.log = folder / f"{instance_id}.log"
        self._came: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = (
            asyncio.Queue()
        )
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Front:
        self._server = await asyncio.start_unix_server(
            lambda reader, writer: self._came.put_nowait((reader, writer)), f"{self.stem}.h"
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()

    async def hello(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await self._came.get()
        assert await reader.readexactly(5) == b"HELLO"
        return reader, writer
