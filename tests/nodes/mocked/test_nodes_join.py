"""``banaserve nodes add`` and ``remove`` with mock engines: a server moves to another agent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from banaserve.base.platform.run_dir import find_admin
from banaserve.cli.main import main
from banaserve.frontdoor.admin_client import AdminClient
from fork_server import ForkServer
from mock_facts import MockOptions
from mock_run import MockRun, mock_node
from node_run import NodeRun
from observing import until
from server_run import Run
from streams import Kind, asked_all, greedy

pytestmark = pytest.mark.deep

KEY = "a-key-of-a-cluster-that-grows"
MOCKS = MockOptions(step_ms=8.0)


@pytest.fixture(scope="module")
def nodes(
    tmp_path_factory: pytest.TempPathFactory,
    fork_server: ForkServer,
    free_port: Callable[[], int],
) -> Iterator[list[NodeRun]]:
    folder = tmp_path_factory.mktemp("nodes")
    addresses = {name: f"127.0.0.1:{free_port()}" for name in ("a", "b")}
    made = [
        mock_node(folder / name, address, KEY, MOCKS, fork_server)
        for name, address in addresses.items()
    ]
    try:
        for node in made:
            node.wait_for("takes a server's engines")
        yield made
    finally:
        for node in made:
            node.close()


@pytest.fixture(scope="module")
def server(
    serve: Callable[..., MockRun], nodes: list[NodeRun], tmp_path_factory: pytest.TempPathFactory
) -> MockRun:
    key_file = tmp_path_factory.mktemp("key") / "key"
    key_file.write_text(KEY)
    words = ("--node", nodes[0].address, "--cluster-key-file", str(key_file))
    return serve("--pd", "1:1", *words)


@pytest.fixture(scope="module")
def admin(server: MockRun) -> AdminClient:
    return AdminClient(*find_admin(server.run_dir))


@pytest.fixture
def banaserve(
    server: MockRun, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    def run(*argv: str) -> tuple[int, str, str]:
        code = main(["nodes", *argv, "--run-dir", str(server.run_dir)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def asked(server: Run, kinds: dict[str, Kind]) -> list[list[int]]:
    answers = asyncio.run(asked_all(server, kinds)).values()
    assert [answer.error for answer in answers] == [""] * len(answers)
    return [answer.tokens[0] for answer in answers]


def placed(admin: AdminClient) -> dict[str, list[str]]:
    return {node.name: node.instances for node in admin.nodes()}


def test_what_cannot_join_or_leave_is_one_line(
    server: MockRun,
    nodes: list[NodeRun],
    admin: AdminClient,
    banaserve: Callable[..., tuple[int, str, str]],
    free_port: Callable[[], int],
    fork_server: ForkServer,
    tmp_path: Path,
) -> None:
    address = f"127.0.0.1:{free_port()}"
    stranger = mock_node(tmp_path / "c", address, KEY[::-1], MOCKS, fork_server)
    try:
        stranger.wait_for("takes a server's engines")
        for action, address, words in (
            ("add", f"127.0.0.1:{free_port()}", "onnection refused"),
            ("add", stranger.address, "it has another cluster key"),
            ("add", nodes[0].address, "is one of this server's already"),
            ("remove", nodes[0].address, "is the server's last one"),
            ("remove", nodes[1].address, "there is no node"),
        ):
            code, out, err = banaserve(action, address)
            assert (code, out) == (2, "")
            assert words in err.splitlines()[-1]
            assert address in err.splitlines()[-1]
    finally:
        stranger.close()
    assert placed(admin) == {nodes[0].address: ["p0", "d0"]}


def test_a_server_moves_to_a_node_that_has_joined_in_mid_stream(
    server: MockRun,
    nodes: list[NodeRun],
    admin: AdminClient,
    banaserve: Callable[..., tuple[int, str, str]],
) -> None:
    first, other = (node.address for node in nodes)
    # Long enough to be under way when engines have started on the other node.
    kinds = greedy(6, 40, 200)
    expected = asked(server, kinds)
    assert banaserve("add", other)[0] == 0
    assert "has taken this node" in nodes[1].printed()
    assert placed(admin) == {first: ["p0", "d0"], other: []}
    assert {node.name for node in admin.placement().nodes} == {first, other}

    async def stream_and_move() -> list[list[list[int]]]:
        removing = asyncio.create_task(asyncio.to_thread(banaserve, "remove", first))
        rounds = []
        while not removing.done():
            answers = (await asked_all(server, kinds)).values()
            assert [answer.error for answer in answers] == [""] * len(kinds)
            rounds.append([answer.tokens[0] for answer in answers])
        code, out, err = await removing
        assert (code, "has left after" in out) == (0, True), err
        return rounds

    rounds = asyncio.run(stream_and_move())
    assert rounds == [expected] * len(rounds)
    assert placed(admin) == {other: ["p1", "d1"]}
    assert {one.node for one in admin.status().instances} == {other}
    until(lambda: "has left" in nodes[0].printed(), "the first node is free")
    until(lambda: len(nodes[0].processes()) == 1, "only its agent is left")
    assert asked(server, kinds) == expected


def test_a_node_that_has_left_joins_again_and_takes_instances(
    server: MockRun,
    nodes: list[NodeRun],
    admin: AdminClient,
    banaserve: Callable[..., tuple[int, str, str]],
) -> None:
    first, other = (node.address for node in nodes)
    kinds = greedy(8, 300)
    expected = asked(server, kinds)
    assert banaserve("add", first)[0] == 0
    main(["scale", "--pd", "2:2", "--run-dir", str(server.run_dir)])
    assert {name: len(its) for name, its in placed(admin).items()} == {first: 2, other: 2}
    assert asked(server, kinds) == expected
    assert server.end() == 0
    for node in nodes:
        until(lambda node=node: len(node.processes()) == 1, "only agents are left")
        node.end()
