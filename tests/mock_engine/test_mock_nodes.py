"""Mock engines on nodes: a node dies under streams, another one joins and the first leaves."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator

import pytest

from banaserve.base.platform.run_dir import find_admin
from banaserve.contracts.control_api import NodeRequest
from banaserve.frontdoor.admin_client import AdminClient
from fork_server import ForkServer
from mock_facts import MockOptions
from mock_run import MockRun, mock_launching, mock_node, mock_serving
from node_run import NodeRun
from observing import until
from streams import Answer, asked_all, differences, greedy

pytestmark = pytest.mark.deep

KEY = "a-key-of-a-cluster-of-mock-engines"
MOCKS = MockOptions(step_ms=4.0)
KINDS = greedy(6, 0, num_tokens=250)


@pytest.fixture(scope="module")
def nodes(
    tmp_path_factory: pytest.TempPathFactory,
    fork_server: ForkServer,
    free_port: Callable[[], int],
) -> Iterator[list[NodeRun]]:
    folder = tmp_path_factory.mktemp("nodes")
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(3)]
    made = [mock_node(folder / one[10:], one, KEY, MOCKS, fork_server) for one in addresses]
    try:
        for node in made:
            node.wait_for("takes a server's engines")
        yield made
    finally:
        for node in made:
            node.close()


@pytest.fixture(scope="module")
def launch(
    tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer
) -> Iterator[Callable[..., MockRun]]:
    yield from mock_launching(tmp_path_factory, fork_server)


@pytest.fixture(scope="module")
def server(
    launch: Callable[..., MockRun], nodes: list[NodeRun], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MockRun]:
    key_file = tmp_path_factory.mktemp("key") / "key"
    key_file.write_text(KEY)
    words = [word for node in nodes[:2] for word in ("--node", node.address)]
    run = mock_serving(launch)("--pd", "2:2", *words, "--cluster-key-file", str(key_file))
    yield run
    assert run.end(signal.SIGTERM) == 0


@pytest.fixture(scope="module")
def expected(server: MockRun) -> dict[str, Answer]:
    answers = asyncio.run(asked_all(server, KINDS))
    assert {(one.error, one.num_tokens) for one in answers.values()} == {("", 250)}
    return answers


def test_node_that_dies_under_streams_loses_none(
    server: MockRun, nodes: list[NodeRun], expected: dict[str, Answer]
) -> None:
    has_died = False

    def die(_: Answer) -> None:
        nonlocal has_died
        if not has_died:
            has_died = True
            nodes[1].signal_all(signal.SIGKILL)

    found = asyncio.run(asked_all(server, KINDS, die))
    assert not differences(KINDS, expected, found)


def test_node_joins_and_gets_an_instance_that_is_added(
    server: MockRun, nodes: list[NodeRun], expected: dict[str, Answer]
) -> None:
    admin = AdminClient(*find_admin(server.run_dir))
    change = admin.node_changes.begin(NodeRequest("add", nodes[2].address))
    until(lambda: not admin.node_changes.show(change.id).is_open, "the node has joined")
    assert {node.name for node in admin.nodes()} >= {nodes[2].address}
    assert not differences(KINDS, expected, asyncio.run(asked_all(server, KINDS)))
