"""Hours under load, deaths and moves: what the processes hold does not grow.

BANASERVE_SOAK_S says how long, 0 leaves it out: ``make test-soak``. The slopes are printed.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait

import pytest

from banaserve.base.errors import UserError
from banaserve.base.platform.run_dir import find_admin
from banaserve.contracts.migration_api import MoveLayers, Return
from banaserve.frontdoor.admin_client import AdminClient
from faults import Choice, Harm, Nemesis, Victims
from resources import Resources, grown, looked_at, slopes
from server_run import Run
from service import Service
from soak_clients import KEYS, SoakClients
from waiting import lasts

SOAK_S = float(os.environ.get("BANASERVE_SOAK_S", "0"))
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not SOAK_S, reason="BANASERVE_SOAK_S says for how long: make test-soak"),
]

NAMES = ("p0", "d0")
OPTIONS = (
    *("--pd", "1:1", "--dtype", "float32", "--kv-store-size", "256MiB"),
    *("--kv-cache-memory-bytes", str(128 << 20), "--max-model-len", "2048"),
)
NUM_CLIENTS = 4
SEED = 11
SAMPLE_S = 5.0
BETWEEN_S = 45.0
READY_S = 180.0
MAX_LOG_KIB = 8


@pytest.fixture(scope="module")
def server(serve: Callable[..., Run]) -> Iterator[Run]:
    keys = [word for key in KEYS for word in ("--api-key", key)]
    run = serve(*OPTIONS, *keys, "--log-max-size", f"{MAX_LOG_KIB}KiB")
    yield run
    assert run.end() == 0


def test_nothing_grows(server: Run) -> None:
    resources, clients = Resources(), SoakClients(server.url, SEED)
    with ThreadPoolExecutor(2) as pool:
        asking = pool.submit(clients.run, NUM_CLIENTS)
        try:
            harming = pool.submit(_harm, server, time.monotonic() + SOAK_S)
            _watch(server, resources, harming)
            print(f"\n{SOAK_S:.0f} s, {harming.result()}")
        finally:
            clients.end()
            asking.result()
            print("\n".join([str(dict(clients.told)), *slopes(resources.seen)]))
    assert clients.wrong == []
    assert grown(resources.seen) == []


def _watch(server: Run, resources: Resources, harming: Future[str]) -> None:
    victims, began_s = Victims(Service(server), NAMES), time.monotonic()
    while not harming.done():
        pids = {name: victims.of(name) for name in ("front", "parent", "kvstore", *NAMES)}
        found = looked_at(pids, server.run_dir, server.temp_dir, server.url, MAX_LOG_KIB << 10)
        resources.note(time.monotonic() - began_s, found)
        wait({harming}, SAMPLE_S)


def _harm(server: Run, until_s: float) -> str:
    """Kill, and move, by turns; returns what was done."""
    draw, nemesis = random.Random(SEED), Nemesis(Service(server), NAMES, None, None, None, SEED)
    admin, num_kills, num_moves = AdminClient(*find_admin(server.run_dir)), 0, 0
    while time.monotonic() < until_s:
        lasts(min(BETWEEN_S, max(0.0, until_s - time.monotonic())))
        if draw.random() < 0.5:
            num_kills += nemesis.strike(Choice(Harm.KILL, draw.choice((*NAMES, "kvstore"))))
            nemesis.wait_whole(READY_S)
        else:
            num_moves += _moved(admin, draw)
    return f"{num_kills} kills, {num_moves} moves"


def _moved(admin: AdminClient, draw: random.Random) -> int:
    """Layers leave one instance for the other and come home; moves that were done."""
    host, target = draw.sample(NAMES, 2)
    first = draw.randrange(25)
    try:
        moves = [admin.run(MoveLayers(host, target, (first, first + 3)))]
        moves.append(admin.run(Return(host)))
    except UserError:  # it has no memory to spare at present
        return 0
    return sum(move.state == "done" for move in moves)
