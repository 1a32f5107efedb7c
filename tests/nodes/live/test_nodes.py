"""``serve --node``: engines on other machines, which are two agents on this one here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from banaserve.base.platform.run_dir import find_admin
from banaserve.contracts.migration_api import MoveLayers, Return
from banaserve.frontdoor.admin_client import AdminClient
from node_run import NodeRun
from server_run import Run
from streams import Kind, asked_all, greedy

pytestmark = pytest.mark.e2e

KEY = "a-key-of-a-cluster-of-two"
OPTIONS = ("--dtype", "float32", "--max-model-len", "2048")


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
def server(serve: Callable[..., Run], nodes: list[NodeRun], key_file: Path) -> Run:
    addresses = [word for node in nodes for word in ("--node", node.address)]
    return serve("--pd", "1:1", *OPTIONS, *addresses, "--cluster-key-file", str(key_file))


@pytest.fixture(scope="module")
def expected(serve: Callable[..., Run]) -> Iterator[Callable[[dict[str, Kind]], list[list[int]]]]:
    """What one plain engine answers."""
    plain = serve("--colocated", "1", "--no-kv-store", "--migration", "off", *OPTIONS)
    yield lambda kinds: asked(plain, kinds)
    plain.end()


def test_tokens_are_those_of_one_engine(
    server: Run, nodes: list[NodeRun], expected: Callable[[dict[str, Kind]], list[list[int]]]
) -> None:
    assert "p0\n" in server.printed()
    for node in nodes:
        assert "has taken this node" in node.printed()
        assert len(node.processes()) >= 4, "an agent, a parent, an engine and a store"
    kinds = greedy(16, 0)
    assert asked(server, kinds) == expected(kinds)
    # Prefilled on one node and read on the other.
    assert server.metric("vllm:external_prefix_cache_hits_total") > 0


def test_layers_move_to_the_other_node_in_mid_stream_and_return(
    server: Run, expected: Callable[[dict[str, Kind]], list[list[int]]]
) -> None:
    kinds = greedy(4, 40)
    wanted, admin = expected(kinds), AdminClient(*find_admin(server.run_dir))

    async def stream_and_move() -> list[list[int]]:
        begun = asyncio.Event()
        answering = asyncio.create_task(asked_all(server, kinds, lambda _: begun.set()))
        await asyncio.wait_for(begun.wait(), 60.0)
        moved = await asyncio.to_thread(admin.run, MoveLayers("d0", "p0", (4, 12)))
        assert moved.state == "done", moved
        back = await asyncio.to_thread(admin.run, Return("d0"))
        assert back.state == "done", back
        return [answer.tokens[0] for answer in (await answering).values()]

    assert asyncio.run(stream_and_move()) == wanted
    assert asked(server, kinds) == wanted
