"""An agent and a server's launcher: processes on the node, what stands for them, who ends whom.

The agent runs in the test's process over real TLS; engines are small scripts in the place of vLLM.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import node_doubles
from banaserve.base.errors import InstanceDeadError, UserError
from banaserve.base.net.addresses import host_and_port
from banaserve.base.platform import processes
from banaserve.base.platform.processes import is_running, wait_dying, wait_ended
from banaserve.base.platform.run_dir import RunDir
from banaserve.kvstore.daemon.options import StoreOptions
from banaserve.migration.rpc.messages import GuestAddress
from banaserve.nodes import link as links
from banaserve.nodes.agent import agent as agents
from banaserve.nodes.agent import remote_process
from banaserve.nodes.agent import session as sessions
from banaserve.nodes.credentials import ClusterCredentials
from banaserve.nodes.link import connect
from banaserve.nodes.measuring import HERE, survey_nodes
from banaserve.nodes.messages import (
    Inspect,
    JoinSession,
    LinkMeasured,
    PrepareNode,
    SessionOpened,
    own_version,
)
from banaserve.nodes.model_check import model_digest
from banaserve.nodes.places import AgentPlace, GivenPlaces
from banaserve.nodes.server import client as clients
from banaserve.serving.launch.messages import StartEngine, StartGuest
from banaserve.transport.errors import PeerGoneError
from banaserve.transport.threaded_server import listen_tcp
from node_doubles import KEY, Front, Scripts, launcher_of, opened, patched, start_node
from ports import free_port
from waiting import eventually, until


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Scripts:
    return patched(monkeypatch)


def test_an_engine_there_talks_with_the_server_and_ends(
    scripts: Scripts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[int] = []

    def kill(pid: int, _: int) -> None:
        killed.append(pid)

    async def run() -> None:
        node = await start_node(tmp_path)
        async with opened(node) as launcher, Front(tmp_path) as front:
            there = launcher.address_there("d0", f"ipc://{front.stem}.i")
            assert Path(there).name == "d0.1.i"
            assert Path(there.removeprefix("ipc://")).parent != front.stem.parent
            pid = await launcher.start(
                StartEngine("d0", front.address, str(front.log), ("--model", "other"))
            )
            reader, writer = await front.hello()
            assert scripts.argv == [("--model", "other")]
            writer.write(b"abc")
            assert await reader.readexactly(3) == b"ABC"
            dying = asyncio.create_task(wait_dying(pid))
            with monkeypatch.context() as patch:
                patch.setattr(remote_process.os, "kill", kill)
                writer.write(b"end")
                await asyncio.wait_for(dying, 60)
                await asyncio.wait_for(wait_ended(pid), 60)
            assert killed == []  # its process id may be that of another process by now
            written_log = front.log.read_text()
            assert f"engine {scripts.pids[0]}\n" in written_log
            assert "SomeError: asked to end" in written_log
        await node.end()

    asyncio.run(run())


DIES_SLOWLY = """
import signal, socket, sys, threading
from banaserve.base.platform import processes
until = threading.Event()
thread = threading.Thread(target=processes._live, args=(until,))
thread.start()
while processes._LIFE not in open(f"/proc/self/task/{thread.native_id}/comm").read():
    pass
sock = socket.socket(socket.AF_UNIX)
sock.connect(sys.argv[1])
sock.sendall(b"HELLO")
sock.recv(100)
until.set()
signal.pause()
"""


def test_an_engine_s_death_is_known_before_its_memory_is_free(
    scripts: Scripts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        os.close(os.pidfd_open(threading.get_native_id(), processes._PIDFD_THREAD))
    except OSError as error:
        pytest.skip(f"this Linux has no descriptors of threads: {error}")
    monkeypatch.setattr(node_doubles, "ENGINE", DIES_SLOWLY)

    async def run() -> None:
        node = await start_node(tmp_path)
        async with opened(node) as launcher, Front(tmp_path) as front:
            pid = await launcher.start(StartEngine("d0", front.address, str(front.log)))
            _, writer = await front.hello()
            dying = asyncio.create_task(wait_dying(pid))
            writer.write(b"die")
            await asyncio.wait_for(dying, 60)
            assert is_running(pid)
            assert is_running(scripts.pids[0])
        await node.end()

    asyncio.run(run())


def test_who_kills_what_stands_for_an_engine_ends_the_engine(
    scripts: Scripts, tmp_path: Path
) -> None:
    async def run() -> None:
        node = await start_node(tmp_path)
        async with opened(node) as launcher, Front(tmp_path) as front:
            pid = await launcher.start(StartEngine("d0", front.address, str(front.log)))
            await front.hello()
            os.kill(pid, signal.SIGKILL)
            await until(lambda: not is_running(scripts.pids[0]))
            # Another one on the same address is another incarnation's.
            again = await launcher.start(StartEngine("d0", front.address, str(front.log)))
            await front.hello()
            assert again != pid
        await until(lambda: not is_running(scripts.pids[1]))
        await node.end()

    asyncio.run(run())


def test_an_agent_that_ends_ends_all_and_the_next_begins_empty(
    scripts: Scripts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("banaserve.nodes.server.pool.RETRY_S", 0.05)

    async def run() -> None:
        node = await start_node(tmp_path, free_port())
        async with opened(node) as launcher, Front(tmp_path) as front:
            pid = await launcher.start(StartEngine("d0", front.address, str(front.log)))
            await front.hello()
            before = launcher.address_there("d0", front.address)
            await node.end()
            await asyncio.wait_for(wait_ended(pid), 60)
            await until(lambda: not is_running(scripts.pids[0]))
            assert "NodeLostError" in front.log.read_text()
            await until(lambda: launcher.nodes()[0].state == "away")
            with pytest.raises(InstanceDeadError, match=rf"node {node.address} is away"):
                await launcher.start(StartEngine("d0", front.address, str(front.log)))
            other = await start_node(tmp_path, node.port)

            def is_back() -> bool:
                try:
                    return launcher.address_there("d0", front.address) != before
                except InstanceDeadError:
                    return False

            await until(is_back)
            await launcher.start(StartEngine("d0", front.address, str(front.log)))
            await front.hello()
        await other.end()

    asyncio.run(run())


def test_a_node_comes_back_after_files_of_the_model_were_replaced_everywhere(
    scripts: Scripts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("banaserve.nodes.server.pool.RETRY_S", 0.05)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")

    async def run() -> None:
        node = await start_node(tmp_path, free_port())
        launcher = launcher_of(node)
        launcher.pool.work = replace(launcher.pool.work, vllm_argv=("--model", str(model)))
        try:
            await launcher.open(lambda _: None)
            (model / "config.json").write_text('{"vocab_size": 10}')
            await node.end()
            await until(lambda: launcher.nodes()[0].state == "away")
            node = await start_node(tmp_path, node.port)
            await until(lambda: launcher.nodes()[0].state == "ready")
        finally:
            await launcher.leave()
            launcher.close()
        await node.end()

    asyncio.run(run())


def test_a_node_comes_back_although_the_server_could_not_read_its_model_at_first(
    scripts: Scripts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("banaserve.nodes.server.pool.RETRY_S", 0.05)
    problems: list[Exception] = [UserError("config.json: No such file"), ValueError("no JSON")]

    def digest(_: object) -> str:
        if problems:
            raise problems.pop()
        return ""

    async def run() -> None:
        node = await start_node(tmp_path, free_port())
        async with opened(node) as launcher:
            monkeypatch.setattr("banaserve.nodes.server.pool.model_digest", digest)
            await node.end()
            await until(lambda: launcher.nodes()[0].state == "away")
            node = await start_node(tmp_path, node.port)
            await until(lambda: launcher.nodes()[0].state == "ready")
            assert problems == []
        await node.end()

    asyncio.run(run())


def test_a_node_comes_back_although_the_port_of_its_store_has_been_taken(
    scripts: Scripts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("banaserve.nodes.server.pool.RETRY_S", 0.05)

    async def listen(_: sessions.NodeSession, order: PrepareNode) -> None:
        assert order.store is not None
        listen_tcp(*host_and_port("store", order.store.listen)).close()

    monkeypatch.setattr(sessions.NodeSession, "_start_store", listen)

    async def run() -> None:
        node = await start_node(tmp_path, free_port())
        async with opened(node, store=StoreOptions(size="1MiB")) as launcher:
            (store,) = launcher.pool.stores()
            await node.end()
            await until(lambda: launcher.nodes()[0].state == "away")
            with listen_tcp(*host_and_port("store", store)):
                node = await start_node(tmp_path, node.port)
                await until(lambda: launcher.nodes()[0].state == "ready")
            assert launcher.pool.stores() != [store]
        await node.end()

    asyncio.run(run())


def test_a_session_that_ends_starts_nothing_that_was_ordered_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks, checked, closes, closed = (threading.Event() for _ in range(4))

    def check(*_: object) -> None:
        checks.set()
        checked.wait()

    class SlowToEnd(Scripts):
        def close(self) -> None:
            closes.set()
            closed.wait()
            super().close()

    async def run() -> None:
        monkeypatch.setattr(sessions, "check_model", check)
        link: Any = SimpleNamespace(receive=asyncio.Event().wait, send=lambda _: asyncio.sleep(0))
        session = sessions.NodeSession(link, "server", "127.0.0.1", RunDir(tmp_path, tmp_path))
        scripts: Any = SlowToEnd()
        session._launcher = scripts
        order = JoinSession(session.incarnation, "d0", "d0.1")
        starting = asyncio.create_task(session.run_process(link, order))
        await asyncio.to_thread(checks.wait)
        closing = asyncio.create_task(session.close())
        await asyncio.to_thread(closes.wait)
        checked.set()
        await asyncio.wait(
            {starting, asyncio.create_task(until(lambda: scripts.pids))},
            return_when="FIRST_COMPLETED",
        )
        closed.set()
        await closing
        assert scripts.pids == []
        with pytest.raises(UserError, match="has not been prepared"):
            await starting

    asyncio.run(run())


def test_what_belonged_to_an_earlier_session_is_refused(scripts: Scripts, tmp_path: Path) -> None:
    async def run() -> None:
        node = await start_node(tmp_path)
        async with opened(node):
            link = await connect("127.0.0.1", node.port, ClusterCredentials.of(KEY))
            await link.send(JoinSession("of another time", "d0", "d0.1"))
            with pytest.raises(links.NodeLostError, match="the node has begun anew"):
                await link.receive()
            await link.close()
        await node.end()

    asyncio.run(run())
    assert scripts.pids == []


def test_a_survey_finds_what_nodes_have_and_how_far_they_are_apart(
    scripts: Scripts, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    argv = ("--model", str(model))

    async def run() -> None:
        nodes = [await start_node(tmp_path) for _ in range(2)]
        there = [AgentPlace("127.0.0.1", node.port) for node in nodes]
        places = [*there, AgentPlace("127.0.0.1", free_port())]
        credentials = ClusterCredentials.of(KEY)
        async with opened(nodes[0]):
            asked = Inspect(argv, model_digest(argv))
            found, ways = await survey_nodes(places, credentials, asked)
        first, second, lost = found
        assert (lost.found, lost.problem) == (None, f"node {lost.name}: Connection refused")
        assert first.found is not None
        assert second.found is not None
        assert (first.found.server, second.found.server) == ("the server", "")
        assert first.found.version == own_version()
        assert abs(first.ahead_s) < 30.0
        names = [node.address for node in nodes]
        pairs = {(way.source, way.target) for way in ways}
        assert pairs == {(HERE, name) for name in names} | {tuple(names), tuple(names[::-1])}
        assert all(way.measured.problem == "" for way in ways)
        assert all(way.measured.bytes_per_s > way.measured.round_trip_s > 0 for way in ways)
        other = Inspect(argv, "of other files")
        again, _ = await survey_nodes(there[:1], credentials, other)
        assert again[0].found is not None
        assert "not those of the server" in again[0].found.model_problem
        stranger, none = await survey_nodes(there[:1], ClusterCredentials.of(KEY[::-1]), asked)
        assert (stranger[0].found, none) == (None, [])
        assert "another cluster key" in stranger[0].problem
        for node in nodes:
            await node.end()

    asyncio.run(run())


class Moving(GivenPlaces):
    """Agents that may come back elsewhere, as those that Ray starts."""

    moved: AgentPlace | None = None

    async def find(self, number: int) -> AgentPlace:
        return self.moved or await super().find(number)


def test_a_node_that_comes_back_elsewhere_is_used_as_before(
    scripts: Scripts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("banaserve.nodes.server.pool.RETRY_S", 0.05)
    monkeypatch.setattr("banaserve.nodes.server.ways._LOOK_S", 0.05)

    async def run() -> None:
        lost, stays = [await start_node(tmp_path) for _ in range(2)]
        places = Moving([lost.address, stays.address])
        launcher = launcher_of(lost, stays)
        launcher.pool.places = places
        try:
            await launcher.open(lambda _: None)
            await until(lambda: launcher.distance("p0", "d0") is not None)
            await lost.end()
            await until(lambda: not launcher.place_of("p0").is_there)
            assert [launcher.has_lost_parent(name) for name in ("p0", "d0")] == [True, False]
            other = await start_node(tmp_path)
            places.moved = AgentPlace("127.0.0.1", other.port)
            await until(lambda: launcher.place_of("p0").is_there)
            assert launcher.place_of("p0").node == other.address
            launcher.reserve("p1")
            assert launcher.place_of("p1").node in (other.address, stays.address)
            await until(lambda: launcher.distance("p0", "d0") is not None)
            assert not [pair for pair in launcher.pool.ways._measured if lost.address in pair]
        finally:
            await launcher.leave()
            launcher.close()
        await stays.end()
        await other.end()

    asyncio.run(run())


def test_a_way_that_cannot_be_measured_any_more_is_not_known(
    scripts: Scripts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("banaserve.nodes.server.ways._LOOK_S", 0.05)
    monkeypatch.setattr("banaserve.nodes.server.ways.AGAIN_S", 0.05)

    async def run() -> None:
        nodes = [await start_node(tmp_path) for _ in range(2)]
        async with opened(*nodes) as launcher:
            await until(lambda: launcher.distance("p0", "d0") is not None)

            async def blocked(*_: object) -> LinkMeasured:
                return LinkMeasured(problem="a firewall")

            monkeypatch.setattr("banaserve.nodes.agent.agent.measure_link", blocked)
            await until(lambda: launcher.distance("p0", "d0") is None)
        for node in nodes:
            await node.end()

    asyncio.run(run())


def test_nodes_are_filled_in_the_order_in_which_they_were_given(
    scripts: Scripts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_node = clients.NodeClient.open

    async def run() -> None:
        nodes = [await start_node(tmp_path) for _ in range(2)]
        other_is_open = asyncio.Event()

        async def late(client: clients.NodeClient) -> SessionOpened:
            if client.name == nodes[0].address:
                await asyncio.wait_for(other_is_open.wait(), 60)
            session = await open_node(client)
            other_is_open.set()
            return session

        monkeypatch.setattr(clients.NodeClient, "open", late)
        async with opened(*nodes) as launcher:
            assert [launcher.place_of(name).node for name in ("p0", "d0")] == [
                n.address for n in nodes
            ]
        for node in nodes:
            await node.end()

    asyncio.run(run())


def test_a_node_has_one_server(
    scripts: Scripts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        node = await start_node(tmp_path)
        async with opened(node, server="the first"):
            with monkeypatch.context() as patch:
                patch.setattr(agents, "_NEXT_S", 0.2)
                with pytest.raises(UserError, match="used by another server, the first"):
                    await launcher_of(node, server="the second").open(lambda _: None)
        async with opened(node, server="the second"):
            pass
        await node.end()
        assert node.said[1:] == [
            "server the first has taken this node",
            "server the first has left: all that ran for it has ended",
            "server the second has taken this node",
            "server the second has left: all that ran for it has ended",
        ]

    asyncio.run(run())


def test_other_versions_are_refused(
    scripts: Scripts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "own_version", lambda: "banaserve 0.0, vLLM 0.1")

    async def run() -> None:
        node = await start_node(tmp_path)
        with pytest.raises(UserError, match=r"has banaserve 0.0, vLLM 0.1, this node banaserve"):
            await launcher_of(node).open(lambda _: None)
        await node.end()

    asyncio.run(run())


def test_a_model_that_a_node_lacks_is_named(
    scripts: Scripts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        node = await start_node(tmp_path)
        launcher = launcher_of(node)
        missing = tmp_path / "no-model"
        launcher.pool.work = replace(launcher.pool.work, vllm_argv=("--model", str(missing)))
        with pytest.raises(UserError, match=rf"node {node.address} refuses: {missing}: this node"):
            await launcher.open(lambda _: None)
        await launcher.leave()
        await node.end()

    asyncio.run(run())


def test_guests_of_one_node_share_memory_and_others_meet_by_tcp(
    scripts: Scripts, tmp_path: Path
) -> None:
    async def run() -> None:
        nodes = [await start_node(tmp_path / str(number)) for number in range(2)]
        async with opened(*nodes) as launcher:
            near = await launcher.guest_place("d0", "d0", "g0-d0-d0", "shm", tmp_path)
            assert near.transport == "shm"
            assert not near.is_elsewhere
            assert Path(near.channel).parent == Path(near.folder)
            far = await launcher.guest_place("d0", "p0", "g1-d0-p0", "shm", tmp_path)
            assert (far.transport, far.is_elsewhere) == ("tcp", True)
            assert far.channel.startswith("tcp:127.0.0.1:")
            address = GuestAddress(
                "g1-d0-p0",
                far.channel,
                "token",
                far.transport,
                far.folder,
                "00" * 16,
                target="p0",
            )
            pid = await launcher.start(StartGuest(address, str(tmp_path / "guest.log")))
            await until(lambda: bool(scripts.addresses))
            # Each side's files are in a folder of its own machine.
            assert scripts.addresses[0].folder != far.folder
            assert scripts.addresses[0].channel == far.channel
            os.kill(pid, signal.SIGKILL)
            await until(lambda: not is_running(scripts.pids[0]))
        for node in nodes:
            await node.end()

    for number in range(2):
        (tmp_path / str(number)).mkdir()
    asyncio.run(run())


@pytest.mark.skipif(
    not Path("/proc/net/if_inet6").exists() or "lo" not in Path("/proc/net/if_inet6").read_text(),
    reason="this machine has no IPv6",
)
def test_nodes_may_have_addresses_of_ipv6(scripts: Scripts, tmp_path: Path) -> None:
    async def run() -> None:
        nodes = [await start_node(tmp_path, host="::1") for _ in range(2)]
        async with opened(*nodes) as launcher:
            await until(lambda: launcher.distance("p0", "d0") is not None)
            far = await launcher.guest_place("d0", "p0", "g1-d0-p0", "shm", tmp_path)
            address = GuestAddress("g1", far.channel, "token", "tcp", far.folder, "00" * 16)
            waiting = asyncio.create_task(asyncio.to_thread(address.accept, 60.0))

            def meets() -> bool:
                with contextlib.suppress(PeerGoneError):
                    address.connect(60.0).close()
                    return True
                return False

            await asyncio.to_thread(eventually, meets)
            (await waiting).close()
        for node in nodes:
            await node.end()

    asyncio.run(run())


def test_a_node_that_joins_others_for_instances_that_are_added(
    scripts: Scripts, tmp_path: Path
) -> None:
    async def run() -> None:
        nodes = [await start_node(tmp_path) for _ in range(2)]
        async with opened(*nodes) as launcher:
            launcher.reserve("d1")
            launcher.reserve("d2")
            folders = {
                Path(launcher.address_there(name, "ipc:///x/y.h")).parent for name in ("d1", "d2")
            }
            assert len(folders) == 2
            launcher.release("d1")
            with pytest.raises(KeyError):
                launcher.address_there("d1", "ipc:///x/y.h")
        for node in nodes:
            await node.end()

    asyncio.run(run())
