"""Nodes that join a server's others, and leave: what is checked, who is told, what is refused.

Agents run in the test's process over real TLS, their stores are real daemons; no engine starts.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from banaserve.base.errors import MigrationError, UserError
from banaserve.kvstore.client.client import StoreClient
from banaserve.kvstore.daemon.options import StoreOptions
from banaserve.nodes.agent import agent
from banaserve.nodes.agent import session as sessions
from banaserve.nodes.server.assignment import InstanceNeed
from banaserve.nodes.server.launcher import NodesLauncher
from banaserve.serving.launch.messages import StartEngine
from node_doubles import Front, Node, Scripts, launcher_of, opened, patched, start_node
from peer_store import FINGERPRINT, SLOT_BYTES, PeerStore, chain
from ports import free_port
from waiting import eventually, until

pytestmark = pytest.mark.deep

STORE = StoreOptions(size=f"{16 * SLOT_BYTES}B")


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Scripts:
    return patched(monkeypatch)


async def joined(launcher: NodesLauncher, node: Node) -> list[str]:
    """What was said meanwhile."""
    said: list[str] = []
    assert await launcher.add_node(node.address, (), said.append) == node.address
    return said


def states(launcher: NodesLauncher) -> dict[str, tuple[str, list[str]]]:
    return {node.name: (node.state, node.instances) for node in launcher.nodes()}


def test_a_node_that_joins_gets_the_next_instance(scripts: Scripts, tmp_path: Path) -> None:
    async def run() -> None:
        first, other = [await start_node(tmp_path) for _ in range(2)]
        async with opened(first) as launcher, Front(tmp_path, "d1") as front:
            launcher.pool.work = replace(launcher.pool.work, need=InstanceNeed(memory_bytes=1))
            said = await joined(launcher, other)
            assert said[-1] == "measuring the ways to the other nodes"
            assert states(launcher) == {
                first.address: ("ready", ["p0", "d0"]),
                other.address: ("ready", []),
            }
            launcher.reserve("d1")
            assert launcher.place_of("d1").node == other.address
            assert launcher.distance("d0", "d1") is not None
            assert launcher.distance("d1", "p0") is not None
            await launcher.start(StartEngine("d1", front.address, str(front.log)))
            await front.hello()
        await until(lambda: other.said[-1].startswith("server the server has left"))
        for node in (first, other):
            await node.end()

    asyncio.run(run())


def test_devices_of_one_that_has_left_are_free_again(scripts: Scripts, tmp_path: Path) -> None:
    async def run() -> None:
        node = await start_node(tmp_path)
        async with opened(node) as launcher, Front(tmp_path) as front, Front(tmp_path, "d1") as on:
            await launcher.start(StartEngine("d0", front.address, str(front.log)))
            await front.hello()
            launcher.release("d0")
            launcher.reserve("d1")
            await launcher.start(StartEngine("d1", on.address, str(on.log)))
            await on.hello()
            assert scripts.released == ["d0"]
        await node.end()

    asyncio.run(run())


def client_of(launcher: NodesLauncher, number: int, store: PeerStore, stack: ExitStack) -> None:
    """Let ``store`` stand for the one that runs on a node."""
    node = launcher.pool.nodes[number].client
    assert node.opened is not None
    store.path = Path(node.opened.folder) / "kv"
    store.client = StoreClient(store.path, FINGERPRINT, client_name="here", timeout_s=10.0)
    stack.callback(store.client.close)


def test_stores_of_nodes_that_join_and_leave_are_read_by_all_others(
    scripts: Scripts, tmp_path: Path, stack: ExitStack
) -> None:
    told: list[list[str]] = []

    async def on_peers(peers: list[str]) -> None:
        told.append(peers)

    async def run() -> None:
        a, b, c = [await start_node(tmp_path) for _ in range(3)]
        stores = [PeerStore(tmp_path, stack, name) for name in "abc"]
        async with opened(a, store=STORE) as launcher:
            launcher.follow_peers(on_peers)
            for number, node in enumerate((b, c), 1):
                await joined(launcher, node)
                assert told[-1] == launcher.pool.stores()
                assert len(told[-1]) == number + 1
            for number, store in enumerate(stores):
                client_of(launcher, number, store, stack)
                await asyncio.to_thread(eventually, store.is_linked)
                await asyncio.to_thread(store.write, chain(100 * number, 3))
            for store in stores:
                for number in range(3):
                    keys = chain(100 * number, 3)
                    await asyncio.to_thread(
                        eventually, lambda s=store, keys=keys: s.read(keys) == 3
                    )
            await launcher.remove_node(c.address)
            assert (len(told[-1]), told[-1]) == (2, launcher.pool.stores())
            names = stores[0].peers().stats
            assert names.available
            order = launcher.pool.nodes[0].order.store
            assert order is not None
            assert order.peers == tuple(told[-1][1:])
        for node in (a, b, c):
            await node.end()

    asyncio.run(run())


def test_a_node_without_instances_is_given_back(scripts: Scripts, tmp_path: Path) -> None:
    async def run() -> None:
        first, other = [await start_node(tmp_path) for _ in range(2)]
        async with opened(first, other) as launcher:
            with pytest.raises(MigrationError, match=rf"{other.address} has instances still: d0"):
                await launcher.remove_node(other.address)
            launcher.hold_node(other.address, is_held=True)
            assert states(launcher)[other.address] == ("leaving", ["d0"])
            for name in ("d1", "d2"):
                launcher.reserve(name)
                assert launcher.place_of(name).node == first.address
            launcher.release("d0")
            await launcher.remove_node(other.address)
            assert list(states(launcher)) == [first.address]
            await until(lambda: "has left" in other.said[-1])
            with pytest.raises(UserError, match=rf"no node {other.address}: this server has 127"):
                launcher.hold_node(other.address, is_held=True)
            await joined(launcher, other)  # it may come again
            assert launcher.num_free_places() > 0
        for node in (first, other):
            await node.end()

    asyncio.run(run())


def refused(launcher: NodesLauncher, address: str, words: str) -> asyncio.Task[None]:
    async def ask() -> None:
        before = states(launcher)
        with pytest.raises(UserError, match=words) as failure:
            await launcher.add_node(address, (), lambda _: None)
        assert "\n" not in str(failure.value)
        assert states(launcher) == before

    return asyncio.create_task(ask())


def test_what_cannot_join_is_refused_in_one_line(
    scripts: Scripts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")

    async def run() -> None:
        first, other, used = [await start_node(tmp_path) for _ in range(3)]
        stranger = await start_node(tmp_path, key="another-key-of-a-cluster")
        async with opened(first) as launcher, opened(used, server="another server"):
            nobody = f"127.0.0.1:{free_port()}"
            await refused(launcher, nobody, rf"^node {nobody}: Connection refused")
            await refused(launcher, stranger.address, r"^node .*: it has another cluster key$")
            await refused(launcher, "10.0.0.3", r"^node '10.0.0.3': write HOST:PORT$")
            await refused(launcher, first.address, r"is one of this server's already$")
            again = f"localhost:{first.port}"
            await refused(launcher, again, rf"^node {again} is one of this server's already$")
            await refused(launcher, used.address, r"is used by another server, another server$")
            with monkeypatch.context() as patch:
                patch.setattr(agent, "own_version", lambda: "banaserve 0.0, vLLM 0.1")
                words = r"^node .* has banaserve 0.0, vLLM 0.1, this server banaserve .*: install"
                await refused(launcher, other.address, words)
            work = launcher.pool.work
            launcher.pool.work = replace(work, vllm_argv=("--model", str(model)))
            with monkeypatch.context() as patch:
                patch.setattr(
                    "banaserve.nodes.server.pool.model_digest", lambda _: "of other files"
                )
                words = r"^node .*: .*/model: this node's files are not those of the server"
                await refused(launcher, other.address, words)
            launcher.pool.work = replace(work, need=InstanceNeed(memory_bytes=1 << 60))
            words = r"^node .* has no room: it has .*iB, and an instance needs .* of memory$"
            await refused(launcher, other.address, words)
            launcher.pool.work = work
            with monkeypatch.context() as patch:
                patch.setattr(sessions, "check_model", fails)
                await refused(launcher, other.address, r"refuses: it could not be prepared$")
            assert [said for said in other.said if "has taken" in said] != []
            await until(lambda: other.said[-1].endswith("all that ran for it has ended"))
            await joined(launcher, other)  # after all that it can
        for node in (first, other, used, stranger):
            await node.end()

    def fails(*_: object) -> None:
        raise UserError("it could not be prepared")

    asyncio.run(run())


def test_a_join_that_is_given_up_leaves_the_node_free(
    scripts: Scripts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        first, other = [await start_node(tmp_path) for _ in range(2)]
        async with opened(first, store=STORE) as launcher:
            for stage in ("preparing node", "measuring the ways"):
                reached = asyncio.Event()

                def say(words: str, stage: str = stage, reached: asyncio.Event = reached) -> None:
                    if words.startswith(stage):
                        reached.set()

                joining = asyncio.create_task(launcher.add_node(other.address, (), say))
                await reached.wait()
                joining.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await joining
                assert list(states(launcher)) == [first.address]
                assert launcher.pool.nodes[0].order.store is not None
                assert launcher.pool.nodes[0].order.store.peers == ()
                await until(lambda: "has left" in other.said[-1])
            await joined(launcher, other)
        for node in (first, other):
            await node.end()

    asyncio.run(run())


def test_a_start_that_fails_gives_back_the_nodes_that_it_has_taken(
    scripts: Scripts, tmp_path: Path
) -> None:
    async def run() -> None:
        first = await start_node(tmp_path)
        launcher = launcher_of(first)
        launcher.pool.work = replace(launcher.pool.work, need=InstanceNeed(memory_bytes=1 << 60))
        with pytest.raises(UserError, match="2 instances, each of which needs"):
            await launcher.open(lambda _: None)
        await until(lambda: "has left" in first.said[-1])
        await launcher.leave()
        await first.end()

    asyncio.run(run())
