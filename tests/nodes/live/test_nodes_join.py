"""``banaserve nodes add``: real engines read blocks of a node that has joined, and it of theirs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

from banaserve.base.platform.run_dir import find_admin
from banaserve.cli.main import main
from banaserve.frontdoor.admin_client import AdminClient
from node_run import NodeRun
from observing import until
from server_run import Run
from streams import Kind, asked_all, greedy

pytestmark = pytest.mark.e2e

KEY = "a-key-of-a-cluster-that-grows"
OPTIONS = ("--dtype", "float32", "--max-model-len", "2048", "--kv-cache-memory-bytes", "268435456")


@pytest.fixture(scope="module")
def nodes(
    tmp_path_factory: pytest.TempPathFactory, free_port: Callable[[], int]
) -> Iterator[list[NodeRun]]:
    folder = tmp_path_factory.mktemp("nodes")
    made = [NodeRun(folder / name, f"127.0.0.1:{free_port()}", KEY) for name in ("a", "b")]
    for node in made:
        node.wait_for("takes a server's engines")
    yield made
    for node in made:
        node.close()


@pytest.fixture(scope="module")
def server(
    serve: Callable[..., Run], nodes: list[NodeRun], tmp_path_factory: pytest.TempPathFactory
) -> Run:
    key_file = tmp_path_factory.mktemp("key") / "key"
    key_file.write_text(KEY)
    words = ("--node", nodes[0].address, "--cluster-key-file", str(key_file))
    return serve("--pd", "1:1", *OPTIONS, *words)


@pytest.fixture(scope="module")
def admin(server: Run) -> AdminClient:
    return AdminClient(*find_admin(server.run_dir))


@pytest.fixture
def banaserve(
    server: Run, capsys: pytest.CaptureFixture[str]
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


def test_blocks_are_read_both_ways_between_one_that_was_there_and_one_that_joins(
    server: Run,
    nodes: list[NodeRun],
    admin: AdminClient,
    banaserve: Callable[..., tuple[int, str, str]],
) -> None:
    """Prompts are prefilled on one and decoded on the other."""
    first, other = (node.address for node in nodes)
    kinds = greedy(8, 300)
    expected = asked(server, kinds)
    assert banaserve("add", other)[0] == 0
    main(["scale", "--pd", "2:2", "--run-dir", str(server.run_dir)])
    assert {name: len(its) for name, its in placed(admin).items()} == {first: 2, other: 2}
    before = server.metric("vllm:external_prefix_cache_hits_total")
    assert asked(server, kinds) == expected
    assert server.metric("vllm:external_prefix_cache_hits_total") > before
    assert server.end() == 0
    for node in nodes:
        until(lambda node=node: len(node.processes()) == 1, "only agents are left")
        node.end()
