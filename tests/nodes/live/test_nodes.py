"""``serve --node``: engines on other machines, which are two agents on this one here."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from banaserve.api.admin_client import AdminClient
from banaserve.engine.vllm.migration.api import MoveLayers, Return
from banaserve.nodes.options import KEY_VARIABLE
from banaserve.run_dir import find_admin
from node_run import NodeRun
from observing import until
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


@pytest.mark.spine
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


def test_no_secret_is_shown(server: Run, nodes: list[NodeRun]) -> None:
    shown = [one.cmdline() for one in server.processes()]
    shown += [one.cmdline() for node in nodes for one in node.processes()]
    assert not any(KEY in word for words in shown for word in words)
    written = "".join(
        path.read_text(errors="replace")
        for folder in (server.run_dir, *(node.run_dir for node in nodes))
        for path in folder.iterdir()
        if path.is_file()
    )
    assert KEY not in written + server.tails()


def test_doctor_compares_the_nodes_with_this_machine(
    server: Run, nodes: list[NodeRun], key_file: Path, free_port: Callable[[], int]
) -> None:
    """While a server uses them, which it says."""
    words = [word for node in nodes for word in ("--node", node.address)]
    command = [sys.executable, "-P", "-m", "banaserve", "doctor", "--json", *words]
    command += ["--node", f"127.0.0.1:{free_port()}", "--cluster-key-file", str(key_file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    found = {one["name"]: one for one in json.loads(done.stdout)["findings"]}
    a, b = (node.address for node in nodes)
    assert "it is in use" in found[f"node {a}"]["detail"]
    lost = next(one for name, one in found.items() if "refused" in one["detail"])
    assert (lost["status"], lost["advice"][:18]) == ("missing", "run `banaserve nod")
    for way in (f"this machine to {a}", f"{a} to {b}", f"{b} to {a}"):
        assert "ms there and back" in found[way]["detail"]
    assert "memory" not in found


def test_a_node_that_dies_is_routed_around_and_comes_back(
    server: Run,
    nodes: list[NodeRun],
    expected: Callable[[dict[str, Kind]], list[list[int]]],
    tmp_path: Path,
) -> None:
    """The decode instance's node dies under streams: they wait, and go on where it is back."""
    kinds = greedy(4, 80)
    wanted, lost = expected(kinds), nodes[1]
    other: list[NodeRun] = []

    async def stream_and_kill() -> list[list[int]]:
        begun = asyncio.Event()
        answering = asyncio.create_task(asked_all(server, kinds, lambda _: begun.set()))
        await asyncio.wait_for(begun.wait(), 60.0)
        lost.signal_all(signal.SIGKILL)
        other.append(NodeRun(tmp_path / "again", lost.address, KEY))
        answers = await answering
        assert [answer.error for answer in answers.values()] == [""] * len(kinds)
        return [answer.tokens[0] for answer in answers.values()]

    try:
        assert asyncio.run(stream_and_kill()) == wanted
        until(
            lambda: server.metric("banaserve_instance_ready", instance_id="d0") == 1, "d0 is back"
        )
        assert asked(server, kinds) == wanted
        assert server.end() == 0
        until(lambda: "has left" in other[0].printed(), "the node is free")
        until(lambda: len(other[0].processes()) == 1, "only the agent is left")
        assert list(other[0].temp_dir.glob("banaserve-*/n*")) == []
        other[0].end()
    finally:
        for node in other:
            node.close()


@pytest.mark.parametrize(
    ("key", "is_there", "words"),
    [
        ("another-key-of-a-cluster", True, "it has another cluster key"),
        (KEY, False, "onnection refused"),
    ],
)
def test_bad_input_is_one_line(
    launch: Callable[..., Run],
    nodes: list[NodeRun],
    free_port: Callable[[], int],
    key: str,
    is_there: bool,
    words: str,
) -> None:
    address = nodes[0].address if is_there else f"127.0.0.1:{free_port()}"
    run = launch("--node", address, env={KEY_VARIABLE: key})
    assert run.process.wait(120) == 2
    said = run.errors.read_text().strip().splitlines()
    assert len(said) == 1
    assert words in said[0]
    assert address in said[0]
