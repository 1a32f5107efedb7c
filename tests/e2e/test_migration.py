"""Layers and heads move between running instances under load, and no token changes.

Greedy, float32, SmolLM2, the store on; what has moved away is poisoned with NaN at its source.
``BANASERVE_MIGRATION_MOVES=100`` makes the random part as long as it should be before a release.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from banaserve import models
from banaserve.api.admin_client import AdminClient
from banaserve.bench.servers import Server, banaserve_server
from banaserve.engine.vllm.moves.words import (
    Ask,
    InstancePlacement,
    MoveHeads,
    MoveLayers,
    Return,
)
from banaserve.errors import UserError
from banaserve.run_dir import find_admin

_path = Path(__file__).parent / "migration_load.py"
_spec = importlib.util.spec_from_file_location("migration_load", _path)
assert _spec is not None
assert _spec.loader is not None
loads: Any = importlib.util.module_from_spec(_spec)
sys.modules["migration_load"] = loads
_spec.loader.exec_module(loads)

pytestmark = pytest.mark.e2e

NUM_STREAMS = 16
NUM_MOVES = int(os.environ.get("BANASERVE_MIGRATION_MOVES", "6"))
SEED = int(os.environ.get("BANASERVE_MIGRATION_SEED", "1"))
OPTIONS = ("--pd", "1:2", "--migration-poison", "--dtype", "float32")
LIGHT = ("--kv-store-size", "512MiB", "--kv-cache-memory-bytes", str(400 << 20))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return loads.Reference(tmp_path_factory.mktemp("reference"), 40, longest=500, seed=3)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("migration") / "run"


@pytest.fixture(scope="module")
def server(run_dir: Path, reference: Any) -> Iterator[Server]:
    with banaserve_server(models.PACKAGED, *OPTIONS, *LIGHT, "--run-dir", str(run_dir)) as started:
        yield started


@pytest.fixture
def admin(server: Server, run_dir: Path) -> Iterator[AdminClient]:
    client = AdminClient(*find_admin(run_dir))
    loads.until_clean(server, client)
    yield client
    loads.until_clean(server, client)


def placed(admin: AdminClient, instance: str) -> InstancePlacement:
    (found,) = [one for one in admin.placement().instances if one.id == instance]
    return found


def test_layers_away_and_back_in_mid_stream(server, admin, reference):
    with loads.streaming(server, reference, NUM_STREAMS) as load:
        early = server.metric("banaserve_first_tokens_total", leg="prefill")
        away = loads.done(admin, MoveLayers("d0", "p0", (10, 20)))
        d0 = placed(admin, "d0")
        assert [(u.at, u.modules["start"], u.modules["end"]) for u in d0.units] == [("p0", 10, 20)]
        assert d0.blocks_gained == away.blocks_gained == (d0.num_blocks - d0.blocks_gained) // 2
        (move,) = away.moves
        assert move.facts["freed_bytes"] >= 0.95 * move.facts["predicted_bytes"] > 0
        load.wait_tokens(150)
        loads.until(
            lambda: server.metric("banaserve_guest_bytes", instance_id="p0") > 50 << 20,
            "p0 counts its guest",
        )
        back = loads.done(admin, Return("d0"))
        assert back.blocks_gained == -away.blocks_gained
        load.wait_tokens(80)
        assert server.metric("banaserve_first_tokens_total", leg="prefill") > early
    assert server.metric("banaserve_migration_lost_steps_total") == 0


def test_prefill_lends_to_decode_and_decode_to_prefill_at_once(server, admin, reference):
    with loads.streaming(server, reference, NUM_STREAMS) as load:
        both = [
            admin.begin(MoveLayers("p0", "d0", (0, 5))),
            admin.begin(MoveLayers("d0", "p0", (24, 30))),
        ]
        ended = [admin.show(one.id, wait_s=30) for one in both]
        assert [one.state for one in ended] == ["done", "done"]
        load.wait_tokens(150)
        loads.done(admin, Return("p0"))
        loads.done(admin, Return("d0"))


def test_heads_and_layers_of_one_instance_and_on_to_a_third(server, admin, reference):
    with loads.streaming(server, reference, NUM_STREAMS) as load:
        loads.done(admin, MoveHeads("d0", "p0", {2: (0, 2), 5: (1,)}))
        loads.done(admin, MoveLayers("d0", "p0", (10, 14)))
        load.wait_tokens(80)
        assert len(placed(admin, "d0").units) == 2
        loads.done(admin, MoveLayers("d0", "d1", (10, 14)))
        loads.done(admin, MoveHeads("d0", "d1", {2: (0, 2), 5: (1,)}))
        assert {unit.at for unit in placed(admin, "d0").units} == {"d1"}
        load.wait_tokens(80)
        loads.done(admin, MoveHeads("p0", "d1", {7: (0, 1, 2)}))
        loads.done(admin, Return("d0", layers=(10, 14)))
        load.wait_tokens(80)
        loads.done(admin, Return("d0"))
        loads.done(admin, Return("p0"))


def test_what_cannot_be_is_refused_before_anything_moves(server, admin):
    for ask, words in [
        (MoveLayers("d0", "d0", (1, 2)), "same instance"),
        (MoveLayers("d0", "q0", (1, 2)), "unknown instance: q0"),
        (MoveLayers("d0", "p0", (20, 31)), "outside of 0:30"),
        (MoveHeads("d0", "p0", {5: (3,)}), "no KV head 3"),
        (Return("d0"), "nothing is away"),
    ]:
        with pytest.raises(UserError, match=words):
            admin.begin(ask)
    assert admin.placement().guests == []


def test_the_commands_find_the_server_by_its_folder(server, admin, run_dir):
    def banaserve(*argv: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "banaserve", *argv, "--run-dir", str(run_dir)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    moved = banaserve("migrate", "layers", "--from", "d0", "--to", "p0", "--layers", "28:30")
    assert moved.returncode == 0, moved.stderr
    assert moved.stderr.endswith(": layers 28:30 to p0: done\n")
    shown = json.loads(banaserve("placement", "--json").stdout)
    assert [len(one["units"]) for one in shown["instances"] if one["id"] == "d0"] == [1]
    assert "beside p0" in banaserve("placement").stdout
    again = banaserve("migrate", "layers", "--from", "d0", "--to", "p0", "--layers", "28:30")
    assert (again.returncode, again.stderr) == (
        2,
        "banaserve: layers 28:30 run beside p0 already\n",
    )
    assert banaserve("migrate", "return", "--from", "d0").returncode == 0


def test_random_moves_at_random_moments(server, admin, reference):
    rng = random.Random(SEED)
    ended = 0
    with loads.streaming(server, reference, NUM_STREAMS) as load:
        while ended < NUM_MOVES:
            load.wait_tokens(rng.randrange(60))
            try:
                migration = admin.run(random_ask(rng))
            except UserError:
                continue  # refused: it overlaps with what is away
            assert (migration.state, migration.error) == ("done", "")
            ended += 1
        for host in ("d0", "d1", "p0"):
            if placed(admin, host).units:
                loads.done(admin, Return(host))
    assert server.metric("banaserve_migration_lost_steps_total") == 0


def random_ask(rng: random.Random) -> Ask:
    """Small ranges more often than large ones; heads of up to three layers."""
    host, target = rng.sample(["d0", "d1", "p0"], 2)
    kind = rng.choice(["layers", "layers", "heads", "heads", "return"])
    if kind == "return":
        return Return(host)
    first = rng.randrange(30)
    if kind == "layers":
        return MoveLayers(host, target, (first, min(30, first + rng.choice([1, 2, 5, 10]))))
    layers = rng.sample(range(30), rng.randint(1, 3))
    return MoveHeads(
        host, target, {n: tuple(sorted(rng.sample(range(3), rng.randint(1, 3)))) for n in layers}
    )
