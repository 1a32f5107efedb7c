"""``serve --node`` with mock engines on two agents: secrets, ``doctor``, a death, bad input."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from banaserve.base.access.key_files import CLUSTER_KEY_VARIABLE
from fork_server import ForkServer
from mock_facts import MockOptions
from mock_run import MockRun, mock_node
from node_run import NodeRun
from observing import until
from server_run import Run
from streams import Kind, asked_all, greedy

pytestmark = pytest.mark.deep

KEY = "a-key-of-a-cluster-of-two"
MOCKS = MockOptions(step_ms=8.0)


def asked(server: Run, kinds: dict[str, Kind]) -> list[list[int]]:
    answers = asyncio.run(asked_all(server, kinds)).values()
    assert [answer.error for answer in answers] == [""] * len(answers)
    return [answer.tokens[0] for answer in answers]


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("key") / "key"
    path.write_text(KEY)
    return path


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
def server(serve: Callable[..., MockRun], nodes: list[NodeRun], key_file: Path) -> MockRun:
    addresses = [word for node in nodes for word in ("--node", node.address)]
    return serve("--pd", "1:1", *addresses, "--cluster-key-file", str(key_file))


def test_no_secret_is_shown(server: MockRun, nodes: list[NodeRun]) -> None:
    shown = [one.cmdline() for one in server.processes()]
    shown += [one.cmdline() for node in nodes for one in node.processes()]
    assert len(shown) > len(nodes)
    assert not any(KEY in word for words in shown for word in words)
    written = "".join(
        path.read_text(errors="replace")
        for folder in (server.run_dir, *(node.run_dir for node in nodes))
        for path in folder.iterdir()
        if path.is_file()
    )
    assert KEY not in written + server.tails()


def test_doctor_compares_the_nodes_with_this_machine(
    server: MockRun,
    nodes: list[NodeRun],
    key_file: Path,
    free_port: Callable[[], int],
    fork_server: ForkServer,
    tmp_path: Path,
) -> None:
    """While a server uses them, which it says."""
    words = [word for node in nodes for word in ("--node", node.address)]
    command = ["banaserve", "doctor", "--json", *words]
    command += ["--node", f"127.0.0.1:{free_port()}", "--cluster-key-file", str(key_file)]
    said, errors = tmp_path / "out", tmp_path / "err"
    with said.open("wb") as out, errors.open("wb") as err:
        done = fork_server.start(command, os.environ, out.fileno(), err.fileno())
    assert done.wait(120) == 1, errors.read_text()
    found = {one["name"]: one for one in json.loads(said.read_text())["findings"]}
    a, b = (node.address for node in nodes)
    assert "it is in use" in found[f"node {a}"]["detail"]
    lost = next(one for name, one in found.items() if "refused" in one["detail"])
    assert (lost["status"], lost["advice"][:18]) == ("failed", "run `banaserve nod")
    for way in (f"this machine to {a}", f"{a} to {b}", f"{b} to {a}"):
        assert "ms there and back" in found[way]["detail"]
    assert "memory" not in found


def test_a_node_that_dies_is_routed_around_and_comes_back(
    server: MockRun,
    nodes: list[NodeRun],
    fork_server: ForkServer,
    tmp_path: Path,
) -> None:
    """The decode instance's node dies under streams: they wait, and go on where it is back."""
    kinds = greedy(4, 80, 250)
    wanted, lost = asked(server, kinds), nodes[1]
    other: list[NodeRun] = []

    async def stream_and_kill() -> list[list[int]]:
        begun = asyncio.Event()
        answering = asyncio.create_task(asked_all(server, kinds, lambda _: begun.set()))
        await asyncio.wait_for(begun.wait(), 60.0)
        lost.close()  # its port is free on return, and all of it ends at once
        other.append(mock_node(tmp_path / "again", lost.address, KEY, MOCKS, fork_server))
        answers = await answering
        assert [answer.error for answer in answers.values()] == [""] * len(kinds)
        return [answer.tokens[0] for answer in answers.values()]

    try:
        assert asyncio.run(stream_and_kill()) == wanted
        other[0].wait_for("has taken this node")
        until(lambda: server.is_ready("d0"), "d0 is back")
        assert asked(server, kinds) == wanted
        assert server.end() == 0
        until(lambda: "has left" in other[0].printed(), "the node is free")
        until(lambda: len(other[0].processes()) == 1, "only the agent is left")
        assert list(other[0].temp_dir.glob("banaserve-*/n*")) == []
        other[0].end()
    finally:
        for node in other:
            print(node.tails())
            node.close()


@pytest.mark.parametrize(
    ("key", "is_there", "words"),
    [
        ("another-key-of-a-cluster", True, "it has another cluster key"),
        (KEY, False, "onnection refused"),
    ],
)
def test_bad_input_is_one_line(
    launch: Callable[..., MockRun],
    nodes: list[NodeRun],
    free_port: Callable[[], int],
    key: str,
    is_there: bool,
    words: str,
) -> None:
    address = nodes[0].address if is_there else f"127.0.0.1:{free_port()}"
    run = launch("--node", address, env={CLUSTER_KEY_VARIABLE: key})
    assert run.process.wait(120) == 2
    said = run.errors.read_text().strip().splitlines()
    assert len(said) == 1
    assert words in said[0]
    assert address in said[0]
