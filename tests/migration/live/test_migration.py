"""Layers, heads and older blocks move between instances under load, and no token changes.

Greedy, float32, a small model of random weights, the store on; what has moved away is poisoned with
NaN at its source. Then guests, hosts and targets die or stand still: every stream ends with
right tokens, everything is at home again or goes on working, no guest, lease or request is left.

One server for all of it. ``BANASERVE_MIGRATION_MOVES=100`` and ``BANASERVE_MIGRATION_STREAMS=16``
make it as long as it should be before a release.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import migration_load as loads
from banaserve.base.config.serve_config import DEFAULT_MICROBATCHES
from banaserve.base.errors import UserError
from banaserve.base.platform.run_dir import find_admin
from banaserve.contracts.migration_api import (
    LayersModules,
    MoveContext,
    MoveHeads,
    MoveLayers,
    OverlapRequest,
    Return,
)
from banaserve.frontdoor.admin_client import AdminClient
from fork_server import ForkServer
from observing import until
from server_run import Run

pytestmark = pytest.mark.e2e

NUM_STREAMS = int(os.environ.get("BANASERVE_MIGRATION_STREAMS", "8"))
NUM_MOVES = int(os.environ.get("BANASERVE_MIGRATION_MOVES", "3"))
SEED = int(os.environ.get("BANASERVE_MIGRATION_SEED", "1"))
SERVE_OPTIONS = (
    *("--pd", "1:2", "--migration-poison", "--dtype", "float32"),
    *("--kv-cache-memory-bytes", str(400 << 20)),
)
LAYERS = MoveLayers("d0", "p0", (10, 20))
HEADS = MoveHeads("d0", "p0", {5: (1, 2)})


@pytest.fixture(scope="module")
def reference(fork_server: ForkServer) -> Any:
    return loads.Reference(fork_server, 24, longest=400, seed=3)


@pytest.fixture(scope="module")
def run_dir(server: Run) -> Path:
    return server.run_dir


@pytest.fixture
def admin(server: Run, run_dir: Path) -> Iterator[AdminClient]:
    client = AdminClient(*find_admin(run_dir))
    loads.until_clean(server, client)
    yield client
    loads.until_clean(server, client)
    assert loads.guests_of(run_dir) == []


def test_layers_away_and_back_in_mid_stream(server, admin, reference):
    with loads.streaming(server, reference, NUM_STREAMS) as load:
        early = server.metric("banaserve_first_tokens_total", leg="prefill")
        away = loads.done(admin, LAYERS)
        d0 = loads.placed(admin, "d0")
        assert [(u.at, u.modules) for u in d0.units] == [("p0", LayersModules(10, 20))]
        assert d0.blocks_gained == away.blocks_gained == (d0.num_blocks - d0.blocks_gained) // 2
        (move,) = away.moves
        assert move.facts["freed_bytes"] >= 0.95 * move.facts["predicted_bytes"] > 0
        load.wait_tokens(80)
        until(
            lambda: server.metric("banaserve_guest_bytes", instance_id="p0") > 50 << 20,
            "p0 counts its guest",
        )
        back = loads.done(admin, Return("d0"))
        assert back.blocks_gained == -away.blocks_gained
        load.wait_tokens(60)
        assert server.metric("banaserve_first_tokens_total", leg="prefill") > early
    assert server.metric("banaserve_migration_lost_steps_total") == 0


def test_prefill_lends_to_decode_and_decode_to_prefill_at_once(server, admin, reference):
    with loads.streaming(server, reference, NUM_STREAMS) as load:
        both = [
            admin.migrations.begin(MoveLayers("p0", "d0", (0, 5))),
            admin.migrations.begin(MoveLayers("d0", "p0", (24, 30))),
        ]
        assert [loads.ended(admin, one).state for one in both] == ["done", "done"]
        load.wait_tokens(80)
        loads.done(admin, Return("p0"))
        loads.done(admin, Return("d0"))


def test_a_guest_saves_its_layers_of_what_is_handed_over(server, admin, reference):
    loads.done(admin, MoveLayers("p0", "d0", (15, 30)))
    overlap = loads.placed(admin, "p0").overlap
    assert (overlap.max_microbatches, overlap.blocker) == (DEFAULT_MICROBATCHES, "")
    longest = range(len(reference.prompts))[-3:]
    saved = server.metric("banaserve_guest_saved_bytes_total", instance_id="p0")
    records = loads.answers(server, reference, longest, salt="nobody has asked this before")
    assert [r.token_ids for r in records] == [reference.tokens[i] for i in longest]
    assert server.metric("banaserve_guest_saved_bytes_total", instance_id="p0") > saved
    loads.done(admin, Return("p0"))


def test_heads_layers_and_older_blocks_of_one_instance_and_on_to_a_third(server, admin, reference):
    with loads.streaming(server, reference, NUM_STREAMS) as load:
        loads.done(admin, MoveHeads("d0", "p0", {2: (0, 2), 5: (1,)}))
        loads.done(admin, MoveLayers("d0", "p0", (10, 14)))
        loads.done(admin, MoveContext("d0", "p0", (16, 20)))
        load.wait_tokens(40)
        assert len(loads.placed(admin, "d0").units) == 3
        loads.done(admin, MoveContext("d0", "d1", (16, 20)))
        loads.done(admin, MoveLayers("d0", "d1", (10, 14)))
        loads.done(admin, MoveHeads("d0", "d1", {2: (0, 2), 5: (1,)}))
        assert {unit.at for unit in loads.placed(admin, "d0").units} == {"d1"}
        load.wait_tokens(40)
        loads.done(admin, MoveHeads("p0", "d1", {7: (0, 1, 2)}))
        loads.done(admin, Return("d0", layers=(10, 14)))
        load.wait_tokens(40)
        loads.done(admin, Return("d0"))
        loads.done(admin, Return("p0"))


def test_what_cannot_be_is_refused_before_anything_moves(server, admin):
    for ask, words in [
        (MoveLayers("d0", "q0", (1, 2)), "unknown instance: q0"),
        (MoveLayers("d0", "p0", (20, 31)), "outside of 0:30"),
        (Return("d0"), "nothing is away"),
    ]:
        with pytest.raises(UserError, match=words):
            admin.migrations.begin(ask)
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
    """And at random an instance waits for its guests, or cuts its steps into parts."""
    rng = random.Random(SEED)
    ended = 0
    with loads.streaming(server, reference, NUM_STREAMS) as load:
        while ended < NUM_MOVES:
            load.wait_tokens(rng.randrange(60))
            admin.overlap(OverlapRequest(rng.choice(("d0", "d1", "p0")), rng.choice((1, 2, 32))))
            try:
                migration = admin.run(loads.random_ask(rng))
            except UserError:
                continue  # refused: it overlaps with what is away
            assert (migration.state, migration.error) == ("done", "")
            ended += 1
        for host in ("d0", "d1", "p0"):
            if loads.placed(admin, host).units:
                loads.done(admin, Return(host))
            admin.overlap(OverlapRequest(host, DEFAULT_MICROBATCHES))
    assert server.metric("banaserve_migration_lost_steps_total") == 0


# ---- faults


KILL_OR_STOP = pytest.mark.parametrize(
    ("number", "ask", "phase"),
    [(signal.SIGKILL, LAYERS, "preparing"), (signal.SIGSTOP, HEADS, "copying")],
    ids=["kill", "stop"],
)


@KILL_OR_STOP
def test_a_guest_is_lost_while_it_is_moved_to(
    server, admin, run_dir, reference, number, ask, phase
):
    with loads.streaming(server, reference, NUM_STREAMS) as load:
        migration = loads.until_phase(admin, admin.migrations.begin(ask), phase)
        loads.strike_guests(run_dir, number)
        migration = loads.ended(admin, migration)
        # A strike that comes after COMMIT is one on a guest that serves.
        assert migration.state in ("failed", "done")
        until(lambda: not loads.units_away(admin), "everything is at home")
        load.wait_tokens(30)


@KILL_OR_STOP
def test_a_guest_that_serves_is_lost(server, admin, run_dir, reference, number, ask, phase):
    lost = server.metric("banaserve_guests_lost_total")
    with loads.streaming(server, reference, NUM_STREAMS) as load:
        loads.done(admin, ask)
        load.wait_tokens(40)
        loads.strike_guests(run_dir, number)
        until(lambda: not loads.units_away(admin), "everything is at home")
        load.wait_tokens(40)
        loads.done(admin, ask)
        load.wait_tokens(20)
        loads.done(admin, Return("d0"))
    until(lambda: server.metric("banaserve_guests_lost_total") == lost + 1, "the loss is counted")


def test_a_guest_is_lost_while_nobody_asks_for_anything(server, admin, run_dir, reference):
    loads.done(admin, LAYERS)
    loads.strike_guests(run_dir, signal.SIGSTOP)
    until(lambda: not loads.units_away(admin), "noticed without a stream")
    with loads.streaming(server, reference, 2) as load:
        load.wait_tokens(20)


def test_a_guest_is_lost_on_the_way_home(server, admin, run_dir, reference):
    with loads.streaming(server, reference, NUM_STREAMS) as load:
        loads.done(admin, LAYERS)
        load.wait_tokens(30)
        migration = loads.until_phase(admin, admin.migrations.begin(Return("d0")), "copying")
        loads.strike_guests(run_dir, signal.SIGKILL)
        assert loads.ended(admin, migration).state in ("failed", "done")
        until(lambda: not loads.units_away(admin), "everything is at home")
        load.wait_tokens(20)


def test_abort_leaves_the_host_as_it_was(server, admin, reference):
    with loads.streaming(server, reference, NUM_STREAMS) as load:
        epoch = loads.placed(admin, "d0").epoch
        migration = loads.until_phase(admin, admin.migrations.begin(LAYERS), "preparing")
        with contextlib.suppress(UserError):  # it comes after COMMIT
            admin.migrations.abort(migration.id)
        state = loads.ended(admin, migration).state
        if state == "done":
            loads.done(admin, Return("d0"))
        else:
            assert (state, loads.placed(admin, "d0").epoch) == ("aborted", epoch)
        assert loads.units_away(admin) == []
        load.wait_tokens(20)


def test_an_aborted_return_stays_away(server, admin, reference):
    with loads.streaming(server, reference, NUM_STREAMS) as load:
        loads.done(admin, LAYERS)
        migration = loads.until_phase(admin, admin.migrations.begin(Return("d0")), "copying")
        with contextlib.suppress(Exception):
            admin.migrations.abort(migration.id)
        state = loads.ended(admin, migration).state
        assert (state, len(loads.units_away(admin))) in (("aborted", 1), ("done", 0))
        load.wait_tokens(20)
        if state == "aborted":
            loads.done(admin, Return("d0"))


@pytest.mark.parametrize("when", ["copying", "away"])
def test_a_host_that_dies_takes_its_guest_with_it(server, admin, run_dir, reference, when):
    with loads.streaming(server, reference, NUM_STREAMS) as load:
        migration = admin.migrations.begin(LAYERS)
        if when == "copying":
            loads.until_phase(admin, migration, when)
        else:
            assert loads.ended(admin, migration).state == "done"
            load.wait_tokens(30)
        loads.strike_engine(run_dir, "d0")
        state = loads.ended(admin, migration).state
        assert state == "done" or (state, when) == ("failed", "copying")
        until(lambda: loads.guests_of(run_dir) == [], "the guest has ended")
        load.wait_tokens(20)


def test_a_host_that_stands_still_for_a_while_goes_on(server, admin, run_dir, reference):
    with loads.streaming(server, reference, NUM_STREAMS) as load:
        migration = loads.until_phase(admin, admin.migrations.begin(LAYERS), "copying")
        loads.strike_engine(run_dir, "d0", signal.SIGSTOP)
        try:
            migration = admin.migrations.show(migration.id, wait_s=1.0)
        finally:
            loads.strike_engine(run_dir, "d0", signal.SIGCONT)
        assert loads.ended(admin, migration).state == "done"
        load.wait_tokens(40)
        loads.done(admin, Return("d0"))


def test_a_target_that_dies_keeps_the_guest_beside_it(server, admin, run_dir, reference):
    with loads.streaming(server, reference, NUM_STREAMS) as load:
        loads.done(admin, LAYERS)
        load.wait_tokens(30)
        guests = loads.guests_of(run_dir)
        loads.strike_engine(run_dir, "p0")
        load.wait_tokens(40)
        assert loads.guests_of(run_dir) == guests
        assert len(loads.units_away(admin)) == 1
        loads.done(admin, Return("d0"))
