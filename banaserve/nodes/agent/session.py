"""Session of one server on a node: the launcher of its engines and guests, and the node's store."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import tempfile
from functools import partial
from pathlib import Path

import msgspec
import psutil

from banaserve.base.errors import BanaServeError, UserError
from banaserve.base.platform.linux import available_memory_bytes, visible_gpus
from banaserve.base.platform.run_dir import RunDir
from banaserve.base.tasks import end_tasks
from banaserve.contracts.environment import STORE_VARIABLE, set_environment
from banaserve.kvstore.daemon.options import PeerOptions, StoreOptions
from banaserve.kvstore.daemon.supervised import SupervisedStore
from banaserve.migration.rpc.messages import GuestAddress
from banaserve.nodes import messages
from banaserve.nodes.agent.remote_process import RemoteProcess
from banaserve.nodes.link import NodeLink
from banaserve.nodes.model_check import check_model
from banaserve.nodes.relay import SOCKET_NAMES
from banaserve.serving.launch.devices import Devices
from banaserve.serving.launch.launcher import ForkLauncher, Launcher, SpawnLauncher
from banaserve.serving.launch.messages import StartEngine, StartGuest
from banaserve.serving.launch.parent_link import start_parent
from banaserve.transport.threaded_server import listen_tcp


class NodeSession:
    """Use of this node by one server, from its connection to the end of its last process.

    Args:
        link: Connection to the server.
        host: Address that the agent listens on; used for free ports, too.
        run: Folders of the agent's run. A run that was killed leaves sockets, which the next run of
            the same user removes.

    Attributes:
        incarnation: Random identifier of this session.
    """

    def __init__(self, link: NodeLink, server: str, host: str, run: RunDir) -> None:
        self.incarnation = secrets.token_hex(8)
        self.server = server
        self._link = link
        self._host = host
        self._logs = run.logs
        self._folder = Path(tempfile.mkdtemp(prefix="n", dir=run.sockets))
        self._launcher: Launcher | None = None
        self._store: SupervisedStore | None = None
        self._processes: set[asyncio.Task[None]] = set()
        self._telling: set[asyncio.Task[None]] = set()
        self._vllm_argv: tuple[str, ...] = ()
        self._variables: list[str] = []
        self._with_devices: set[str] = set()

    async def run(self) -> None:
        """Serve the server until it is gone.

        Raises:
            BanaServeError: The server is gone, or has sent an invalid message.
        """
        opened = messages.SessionOpened(
            self.incarnation,
            str(self._folder),
            tuple(visible_gpus()),
            available_memory_bytes(),
            len(psutil.Process().cpu_affinity()),
        )
        await self._link.send(opened)
        while True:
            match said := await self._link.receive():
                case messages.PrepareNode():
                    try:
                        await self._prepare(said)
                    except (BanaServeError, OSError) as error:
                        await self._link.send(messages.NodeRefused(str(error)))
                        raise
                    await self._link.send(messages.Done())
                case messages.FreePort():
                    await self._link.send(messages.PortFound(_free_port(self._host)))
                case messages.SetStorePeers(peers):
                    if self._store is not None:
                        await self._store.set_peers(peers)
                    await self._link.send(messages.Done())
                case _:
                    await self._link.send(
                        messages.NodeRefused(f"a {type(said).__name__} belongs elsewhere")
                    )
                    return

    async def _prepare(self, order: messages.PrepareNode) -> None:
        if self._launcher is not None:
            raise UserError("the node has been prepared already")
        self._vllm_argv = order.vllm_argv
        await asyncio.to_thread(check_model, order.vllm_argv, order.model_digest)
        for name, value in order.environment.items():
            if name not in os.environ:
                os.environ[name] = value
                self._variables.append(name)
        set_environment()
        os.environ[STORE_VARIABLE] = str(self._folder / "kv")
        store = asyncio.create_task(self._start_store(order))
        try:
            self._launcher = await self._make_launcher(order)
        finally:
            await asyncio.gather(store, return_exceptions=True)
        store.result()

    async def _make_launcher(self, order: messages.PrepareNode) -> Launcher:
        argv = list(order.vllm_argv)
        if order.forks:
            start = partial(start_parent, argv)
            return ForkLauncher(await start(), start)
        return SpawnLauncher(argv, Devices({}, visible_gpus(), order.devices_each))

    async def _start_store(self, order: messages.PrepareNode) -> None:
        if order.store is None:
            return
        self._store = SupervisedStore(
            self._folder / "kv",
            _store_options(order.store),
            self._logs / "kvstore.log",
            self._tell_of_restart,
        )
        await self._store.start()

    def _tell_of_restart(self) -> None:
        async def tell() -> None:
            with contextlib.suppress(BanaServeError):
                await self._link.send(messages.StoreRestarted())

        task = asyncio.create_task(tell())
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def run_process(self, link: NodeLink, order: messages.JoinSession) -> None:
        """Run an engine or a guest until its process or its connection has ended.

        Raises:
            BanaServeError: The process could not be started.
        """
        argv = order.vllm_argv or self._vllm_argv
        await asyncio.to_thread(check_model, argv, order.model_digest)
        if (launcher := self._launcher) is None:  # perhaps by now: the session may have ended
            raise UserError("the node has not been prepared")
        if order.guest:
            address = msgspec.json.decode(order.guest, type=GuestAddress)
            stem = self._folder / Path(address.guest_id).name

            async def start(log: Path) -> int:
                return await launcher.start(StartGuest(address, str(log), order.vllm_argv))
        else:
            if not (order.engine and order.stem):
                raise UserError("an order without an engine")
            stem = self._folder / order.stem
            for name in self._with_devices.difference(order.instances):
                launcher.release(name)
            launcher.reserve(order.engine)
            self._with_devices = {*self._with_devices.intersection(order.instances), order.engine}

            async def start(log: Path) -> int:
                engine, shake = order.engine, f"ipc://{stem}.h"
                return await launcher.start(StartEngine(engine, shake, str(log), order.vllm_argv))

        sockets = () if order.guest else SOCKET_NAMES
        running = asyncio.create_task(RemoteProcess(link, stem, start, sockets).run())
        self._processes.add(running)
        try:
            await asyncio.shield(running)
        finally:
            await end_tasks(running)
            self._processes.discard(running)

    async def close(self) -> None:
        """End every process of the session."""
        launcher, self._launcher = self._launcher, None  # from now on nothing is started
        await end_tasks(*self._processes)
        if launcher is not None:
            await asyncio.to_thread(launcher.close)
        if self._store is not None:
            await self._store.stop()
        for task in self._telling:
            task.cancel()
        for name in self._variables:
            os.environ.pop(name, None)
        shutil.rmtree(self._folder, ignore_errors=True)


def _store_options(told: messages.NodeStore) -> StoreOptions:
    return StoreOptions(
        size=told.size,
        ssd=Path(told.ssd) if told.ssd else None,
        ssd_size=told.ssd_size,
        distributed=told.distributed,
        tenant_quota=told.tenant_quota,
        kept_quota=told.kept_quota,
        verify_memory=told.verify_memory,
        peers=PeerOptions(told.listen, told.peers, told.key),
    )


def _free_port(host: str) -> int:
    with listen_tcp(host) as unused:
        port: int = unused.getsockname()[1]
        return port
