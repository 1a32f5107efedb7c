"""The coordinator over instances that answer as the worker's contract says, and real processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from banaserve.base.errors import MigrationError, UserError
from banaserve.contracts.migration_api import Migration, MoveExperts, MoveHeads, MoveLayers, Return
from banaserve.serving.moves.sizes import GUEST_BYTES
from migration_doubles import LAYERS, Cluster, done
from waiting import until

HEADS = MoveHeads("d0", "p0", {5: (1, 2)})
ONE_HEAD = MoveHeads("d0", "p0", {5: (1,)})
WHOLE_MOVE = ["attach", "prepare", "precopy", "commit", "free", "resize_pool"]


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    await made.close()


# ---- moves that succeed


async def test_layers_go_through_every_phase_and_the_pool_grows(cluster):
    migration = await done(cluster.coordinator, LAYERS)
    assert cluster.engine.calls == WHOLE_MOVE
    assert cluster.engine.pool_sizes == [450]
    assert migration.blocks_gained == 150
    (move,) = migration.moves
    assert move.facts["stall_s"] == 0.004
    phases = ["starting", "preparing", "copying", "committing", "freeing", "growing"]
    assert list(move.seconds) == phases
    assert (move.phase, move.to) == ("done", "p0")
    assert migration.predicted_bytes == 10 * (1000 + 300 * 3000)


async def test_heads_that_make_no_block_say_so(cluster):
    migration = await done(cluster.coordinator, ONE_HEAD)
    assert migration.blocks_gained == 300 * 1000 // (30 * 3000 - 1000)
    tiny = MoveHeads("d0", "p0", {6: (0,)})
    cluster.engine.pool_blocks = 600
    migration = await done(cluster.coordinator, tiny)
    assert migration.notes == ["heads 6/0: frees bytes, but no block of the pool"]


async def test_copies_are_repeated_while_they_shrink(cluster):
    cluster.engine.dirty = [40, 10, 8]
    await done(cluster.coordinator, LAYERS)
    assert cluster.engine.calls.count("precopy") == 3


async def test_return_shrinks_the_pool_before_it_moves(cluster):
    await done(cluster.coordinator, LAYERS)
    cluster.engine.calls.clear()
    cluster.engine.busy = [3, 2, 1]
    migration = await done(cluster.coordinator, Return("d0"))
    assert cluster.engine.calls == ["resize_pool", "move_on", "precopy", "commit", "free"]
    assert cluster.engine.pool_sizes == [450, 300]
    assert migration.blocks_gained == -150
    assert cluster.engine.units == {}


async def test_return_of_one_of_two_keeps_what_the_other_gains(cluster):
    await done(cluster.coordinator, LAYERS)
    await done(cluster.coordinator, MoveLayers("d0", "p1", (20, 25)))
    assert cluster.engine.pool_blocks == 600
    await done(cluster.coordinator, Return("d0", layers=(10, 20)))
    assert cluster.engine.pool_blocks == 360
    await done(cluster.coordinator, Return("d0"))
    assert cluster.engine.pool_blocks == 300


async def test_a_unit_moves_on_to_a_third_instance(cluster):
    await done(cluster.coordinator, LAYERS)
    await done(cluster.coordinator, MoveLayers("d0", "p1", (10, 20)))
    (unit,) = cluster.engine.units.values()
    assert unit["unit_id"] == "m1.0"
    assert unit["guest_id"] == "g1-d0-p1"
    assert cluster.engine.pool_blocks == 450


async def test_a_range_that_is_partly_away_is_completed(cluster):
    await done(cluster.coordinator, MoveLayers("d0", "p1", (12, 15)))
    migration = await done(cluster.coordinator, LAYERS)
    assert [move.modules for move in migration.moves] == [
        "layers 12:15",
        "layers 10:12",
        "layers 15:20",
    ]
    assert {unit["guest_id"].split("-")[2] for unit in cluster.engine.units.values()} == {"p0"}


async def test_heads_share_a_guest_and_layers_get_one_that_does_not_serve(cluster):
    await done(cluster.coordinator, HEADS)
    await done(cluster.coordinator, MoveHeads("d0", "p0", {6: (0,)}))
    assert len(cluster.launcher.processes) == 1
    await done(cluster.coordinator, LAYERS)
    assert len(cluster.launcher.processes) == 2


async def test_moves_of_one_host_wait_for_each_other_and_those_of_others_do_not(cluster):
    cluster.engine.held = {"preparing"}
    first = await cluster.coordinator.begin(LAYERS)
    second = await cluster.coordinator.begin(HEADS)
    other = await done(cluster.coordinator, MoveLayers("p0", "d0", (0, 5)))
    assert (first.state, second.state, other.state) == ("running", "waiting", "done")
    cluster.engine.held.clear()
    await cluster.coordinator.wait(second.id)
    assert (first.state, second.state) == ("done", "done")
    assert cluster.engine.calls.index("free") < cluster.engine.calls.index(
        "prepare", cluster.engine.calls.index("prepare") + 1
    )


async def test_a_commit_whose_answer_is_lost_counts(cluster):
    cluster.engine.lost_answers = {"commit"}
    migration = await done(cluster.coordinator, LAYERS)
    assert migration.moves[0].facts["stall_s"] == 0.004
    assert cluster.engine.calls == WHOLE_MOVE


# ---- refused before anything moves


@pytest.mark.parametrize(
    ("ask", "reason"),
    [
        (MoveLayers("d0", "d0", (10, 20)), "the same instance"),
        (MoveLayers("d9", "p0", (10, 20)), "unknown instance: d9"),
        (MoveLayers("d0", "p9", (10, 20)), "unknown instance: p9"),
        (MoveLayers("d0", "p0", (20, 20)), "empty"),
        (MoveHeads("d0", "p0", {5: (7,)}), "no KV head 7"),
        (MoveLayers("x0", "p0", (0, 1)), "MLA cannot be moved"),
        (Return("d0"), "nothing is away"),
        (Return("d0", layers=(1, 2), heads={5: (1,)}), "not several"),
        (MoveExperts("d0", "p0", {5: (1,)}), "this model has no experts"),
    ],
)
async def test_refused_at_once(cluster, ask, reason):
    with pytest.raises(UserError, match=reason):
        await cluster.coordinator.begin(ask)
    assert cluster.engine.calls == []
    assert cluster.launcher.processes == []
    assert cluster.coordinator.recent() == []


async def test_two_migrations_of_one_module_at_once_are_refused(cluster):
    cluster.engine.held = {"preparing"}
    first = await cluster.coordinator.begin(LAYERS)
    for ask in (MoveLayers("d0", "p1", (19, 21)), MoveHeads("d0", "p1", {12: (0,)})):
        with pytest.raises(MigrationError, match=f"on its way in migration {first.id}"):
            await cluster.coordinator.begin(ask)
    cluster.engine.held.clear()
    await cluster.coordinator.wait(first.id)


async def test_two_requests_at_the_same_time_are_not_both_taken(cluster):
    answers = await asyncio.gather(
        cluster.coordinator.begin(LAYERS), cluster.coordinator.begin(LAYERS), return_exceptions=True
    )
    assert [type(answer) for answer in answers] == [Migration, MigrationError]


async def test_a_target_without_room_is_refused(tmp_path):
    cluster = Cluster(tmp_path, available_bytes=200 << 20)
    await done(cluster.coordinator, HEADS)
    cluster.coordinator._available = lambda _: 1 << 20
    with pytest.raises(MigrationError, match="p0 has no room for layers 10:20"):
        await cluster.coordinator.begin(LAYERS)
    await cluster.close()


async def test_room_that_a_move_under_way_needs_is_not_given_twice(cluster):
    cluster.coordinator._available = lambda _: 200 << 20
    cluster.engine.held = {"preparing"}
    first = await cluster.coordinator.begin(LAYERS)
    cluster.coordinator._available = lambda _: GUEST_BYTES + first.predicted_bytes
    other = MoveLayers("p0", "d0", (0, 5))
    with pytest.raises(MigrationError, match="d0 has no room for layers 0:5"):
        await cluster.coordinator.begin(other)
    cluster.engine.held.clear()
    await cluster.coordinator.wait(first.id)
    await done(cluster.coordinator, other)


async def test_an_instance_that_is_down_is_refused(cluster):
    cluster.d0.die()
    with pytest.raises(MigrationError, match="does not serve at present"):
        await cluster.coordinator.begin(LAYERS)


@pytest.mark.parametrize("name", ["d0", "p0"])
async def test_nothing_moves_from_or_to_an_instance_that_a_restart_replaces(cluster, name):
    replacing = cluster.coordinator.hosts[name].instance.service.replacing()
    with replacing, pytest.raises(MigrationError, match=f"{name} is being restarted"):
        await cluster.coordinator.begin(LAYERS)
    await done(cluster.coordinator, LAYERS)


async def test_nothing_moves_while_engines_sleep(cluster):
    host_state = cluster.coordinator.hosts["d0"]
    refresh = host_state.refresh

    async def paused_meanwhile():
        cluster.d0.is_paused = True
        return await refresh()

    host_state.refresh = paused_meanwhile
    with pytest.raises(MigrationError, match="sleep or are paused"):
        await cluster.coordinator.begin(LAYERS)
    assert cluster.coordinator.recent() == []


async def test_all_moves_end_at_once(cluster):
    cluster.engine.held = {"copying"}
    moving = await cluster.coordinator.begin(LAYERS)
    waiting = await cluster.coordinator.begin(HEADS)
    await until(lambda: moving.moves[0].phase == "copying")
    await cluster.coordinator.end_moves("the test", "p1")
    assert [moving.state, waiting.state] == ["running", "waiting"]
    await cluster.coordinator.end_moves("the engines sleep")
    assert {moving.state, waiting.state} == {"aborted"}
    assert {moving.error, waiting.error} == {"the engines sleep"}
    assert (cluster.engine.calls[-1], cluster.engine.units) == ("abort", {})


# ---- given up


@pytest.mark.parametrize("held", ["preparing", "copying"])
async def test_abort_leaves_everything_at_home(cluster, held):
    cluster.engine.held = {held}
    migration = await cluster.coordinator.begin(LAYERS)
    await until(lambda: migration.moves[0].phase == held)
    cluster.coordinator.abort(migration.id)
    await cluster.coordinator.wait(migration.id)
    assert (migration.state, migration.error) == ("aborted", "")
    assert cluster.engine.calls[-1] == "abort"
    assert (cluster.engine.units, cluster.engine.pool_blocks) == ({}, 300)
    cluster.engine.held.clear()
    await done(cluster.coordinator, LAYERS)
    assert len(cluster.launcher.processes) == 1


async def test_abort_does_not_wait_for_a_guest_that_starts(cluster):
    cluster.engine.held = {"connecting"}
    migration = await cluster.coordinator.begin(LAYERS)
    await until(lambda: cluster.engine.attached)
    cluster.coordinator.abort(migration.id)
    await cluster.coordinator.wait(migration.id)
    assert (migration.state, migration.error) == ("aborted", "")
    await until(lambda: not list(cluster.coordinator.guests))


async def test_abort_of_one_that_waits_needs_no_turn(cluster):
    cluster.engine.held = {"preparing"}
    first = await cluster.coordinator.begin(LAYERS)
    second = await cluster.coordinator.begin(HEADS)
    cluster.coordinator.abort(second.id)
    await cluster.coordinator.wait(second.id)
    assert (first.state, second.state) == ("running", "aborted")
    cluster.engine.held.clear()
    await cluster.coordinator.wait(first.id)
    assert first.state == "done"


async def test_an_aborted_return_gives_the_pool_its_blocks_back(cluster):
    await done(cluster.coordinator, LAYERS)
    cluster.engine.held = {"copying"}
    migration = await cluster.coordinator.begin(Return("d0"))
    await until(lambda: migration.moves[0].phase == "copying")
    assert cluster.engine.pool_blocks == 300
    cluster.coordinator.abort(migration.id)
    await cluster.coordinator.wait(migration.id)
    assert migration.state == "aborted"
    assert (list(cluster.engine.units), cluster.engine.pool_blocks) == (["m1.0"], 450)
    assert migration.blocks_gained == 0


async def test_the_end_of_the_server_waits_for_no_host(cluster):
    """It ends with the server, and may be in a long step or stand still."""
    cluster.engine.held = {"copying"}
    migration = await cluster.coordinator.begin(LAYERS)
    await until(lambda: migration.moves[0].phase == "copying")
    await cluster.coordinator.stop()
    assert (migration.state, migration.error) == ("aborted", "the server stops")
    assert "abort" not in cluster.engine.calls


async def test_what_has_ended_cannot_be_aborted(cluster):
    migration = await done(cluster.coordinator, LAYERS)
    with pytest.raises(MigrationError, match="is done: nothing to abort"):
        cluster.coordinator.abort(migration.id)
    with pytest.raises(MigrationError, match="no migration m99"):
        cluster.coordinator.abort("m99")
