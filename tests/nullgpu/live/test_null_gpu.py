"""What leaves and comes home on CUDA, as far as a GPU that computes nothing shows it.

Tokens mean nothing here. Shown is that the Python of CUDA's path runs: start, hand-over, moves
under streams, and that no stream is cut short.
"""

from __future__ import annotations

import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import environment_files
from banaserve.base.platform.run_dir import find_admin
from banaserve.contracts.migration_api import (
    MigrationRequest,
    MoveContext,
    MoveExperts,
    MoveHeads,
    MoveLayers,
    Return,
)
from banaserve.frontdoor.admin_client import AdminClient
from benchmarks.random_model import make_model
from docs.null_gpu import KINDS, Shown
from null_server import NullServer, Setup, started

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.skipif(bool(environment_files.missing()), reason=environment_files.missing()),
]

ORDERS: dict[str, MigrationRequest] = {
    "layers": MoveLayers("d0", "p0", (2, 4)),
    "heads": MoveHeads("d0", "p0", {2: (0,), 3: (0,)}),
    "context": MoveContext("d0", "p0", (2, 4)),
    "experts": MoveExperts("d0", "p0", {2: (0, 1), 3: (0, 1)}),
}
# No experts with graphs: torch's kernels count a guest's tokens, and the step takes the memory that
# a count of what lies there asks for.
SETUPS = [
    Setup(),
    Setup("tiny-moe"),
    Setup(graphs=True),
    Setup(runner=2),
    Setup(graphs=True, runner=2),
    Setup(ranks=2),
]


def kinds_of(setup: Setup) -> tuple[str, ...]:
    if setup.size == "tiny-moe":
        return ("experts",)
    # Heads stay on their ranks. Which blocks a step writes is known by positions that torch's
    # kernels compute for the first runner: what lies in their place is anything.
    if setup.ranks > 1:
        return KINDS[:2]
    return KINDS[:-1] if setup.runner == 2 else KINDS[:3]


def cases() -> list[Any]:
    return [
        pytest.param(setup, kind, id=f"{setup.name}-{kind}")
        for setup in SETUPS
        for kind in kinds_of(setup)
    ]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    sizes = {setup.size for setup in SETUPS}
    return {size: make_model(size, folder / size, "bfloat16") for size in sizes}


@pytest.fixture(scope="module")
def servers(
    models: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Any]]:
    """The server that runs, at most one, and its context; the next setup ends it."""
    running: dict[str, Any] = {"folder": tmp_path_factory.mktemp("servers")}
    yield running
    if context := running.get("context"):
        context.__exit__(None, None, None)


def server_of(setup: Setup, servers: dict[str, Any], models: dict[str, str]) -> NullServer:
    if servers.get("setup") != setup:
        if context := servers.pop("context", None):
            context.__exit__(None, None, None)
        context = started(setup, models[setup.size], servers["folder"])
        servers |= {"server": context.__enter__(), "context": context, "setup": setup}
    found: NullServer = servers["server"]
    return found


@pytest.mark.parametrize(("setup", "kind"), cases())
def test_it_leaves_and_comes_home_under_streams(
    setup: Setup, kind: str, servers: dict[str, Any], models: dict[str, str]
) -> None:
    server = server_of(setup, servers, models)
    assert not server.refusal
    if kind == "hand-over":
        assert server.complete(20) == 20
        assert handed_over(server) > 0
        record(setup, kind)
        return
    admin = AdminClient(*find_admin(server.run_dir))
    with server.streams(200) as lengths:
        for order in (ORDERS[kind], Return("d0")):
            migration = admin.run(order)
            assert migration.state == "done", migration.error
            before = len(lengths)
            assert server.complete(50) == 50
            assert before <= len(lengths)
    assert set(lengths) == {200}, "a stream was cut short"
    record(setup, kind)


def handed_over(server: NullServer) -> float:
    """Return how many requests had a leg on each instance."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as page:
        lines = page.read().decode().splitlines()
    of_requests = [line for line in lines if line.startswith("banaserve_requests_total{")]
    return sum(float(line.split()[-1]) for line in of_requests if 'way="two_legs"' in line)


def record(setup: Setup, kind: str) -> None:
    """Note what was shown to work, where `make test-nullgpu` wants it."""
    if not (place := os.environ.get("BANASERVE_NULL_GPU_RECORD")):
        return
    path = Path(place)
    rows = msgspec.json.decode(path.read_bytes(), type=list[Shown]) if path.exists() else []
    site = environment_files.SITE
    version = next(site.glob("vllm-*.dist-info")).name.split("-")[1].removesuffix(".dist")
    new = Shown(kind, setup.graphs, setup.runner, setup.ranks, version)
    kept = [row for row in rows if row != new]
    path.write_bytes(msgspec.json.format(msgspec.json.encode([*kept, new])) + b"\n")
