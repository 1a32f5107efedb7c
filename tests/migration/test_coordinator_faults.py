"""Hosts, guests and targets that fail under the coordinator, and what looks after guests."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from banaserve.base.errors import InstanceDeadError
from banaserve.contracts.migration_api import MoveLayers, Return
from banaserve.serving.launch.launcher import GuestPlace
from banaserve.serving.monitoring import metrics
from banaserve.serving.moves import host_client, move_plan
from banaserve.serving.moves.guest_monitor import GuestMonitor
from banaserve.serving.moves.placement import placement_of
from migration_doubles import LAYERS, Cluster, done, run
from waiting import until


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    await made.close()


# ---- faults


@pytest.mark.parametrize(
    "where", ["attach", "prepare", "preparing", "precopy", "copying", "commit"]
)
async def test_a_failure_before_commit_leaves_everything_at_home(cluster, where):
    cluster.engine.faults = {where: "the guest refuses"}
    migration = await run(cluster.coordinator, LAYERS)
    assert (migration.state, migration.error) == ("failed", "the guest refuses")
    assert (cluster.engine.units, cluster.engine.pool_blocks) == ({}, 300)
    cluster.engine.faults = {}
    await done(cluster.coordinator, LAYERS)


async def test_a_phase_that_takes_too_long_is_given_up(cluster, monkeypatch):
    monkeypatch.setitem(move_plan._ALLOWED, "preparing", (0.05, 1e12))
    cluster.engine.held = {"preparing"}
    migration = await run(cluster.coordinator, LAYERS)
    assert migration.state == "failed"
    assert migration.error == "preparing took more than 0 s"
    assert cluster.engine.calls[-1] == "abort"


async def test_blocks_in_use_keep_layers_away(cluster, monkeypatch):
    await done(cluster.coordinator, LAYERS)
    monkeypatch.setitem(move_plan._ALLOWED, "shrinking", (0.05, 1e12))
    cluster.engine.busy = [7] * 1000
    migration = await run(cluster.coordinator, Return("d0"))
    assert "7 KV blocks beyond 300 are in use" in migration.error
    assert (list(cluster.engine.units), cluster.engine.pool_blocks) == (["m1.0"], 450)


async def test_a_guest_that_dies_while_it_prepares_ends_the_move(cluster):
    cluster.engine.held = {"preparing"}
    migration = await cluster.coordinator.begin(LAYERS)
    await until(lambda: migration.moves[0].phase == "preparing")
    cluster.launcher.processes[0].kill()
    await cluster.coordinator.wait(migration.id)
    assert (migration.state, migration.error) == ("failed", "the guest beside p0 has ended")
    assert list(cluster.coordinator.guests) == []


@pytest.mark.parametrize("dies", [0, 1])
async def test_the_processes_of_a_guest_end_together(cluster, dies):
    cluster.d0.num_ranks = 2
    await done(cluster.coordinator, LAYERS)
    (guest,) = cluster.coordinator.guests
    assert guest.pids == tuple(process.pid for process in cluster.launcher.processes)
    ((first, second),) = cluster.engine.attached
    assert (first["rank"], second["rank"]) == (0, 1)
    assert first["rendezvous"] == second["rendezvous"] != ""
    assert first["channel"] != second["channel"]
    cluster.launcher.processes[dies].kill()
    await until(lambda: not list(cluster.coordinator.guests))
    assert [one.wait() for one in cluster.launcher.processes] == [-signal.SIGKILL] * 2
    assert cluster.coordinator.guests.has_lost_one.is_set()


async def test_ranks_go_to_no_other_machine(cluster, monkeypatch):
    there = GuestPlace("tcp:10.0.0.2:1", "tcp", "/run", "10.0.0.2", is_elsewhere=True)

    async def place(*_: Any) -> GuestPlace:
        return there

    monkeypatch.setattr(cluster.launcher, "guest_place", place)
    cluster.d0.num_ranks = 2
    migration = await run(cluster.coordinator, LAYERS)
    assert migration.state == "failed"
    assert "on its own machine alone, and p0 is on another" in migration.error
    assert cluster.launcher.processes == []
    cluster.d0.num_ranks = 1
    await done(cluster.coordinator, LAYERS)


async def test_each_rank_of_a_guest_needs_a_gpu(cluster):
    cluster.d0.num_ranks, cluster.launcher.devices = 2, "3"
    migration = await run(cluster.coordinator, LAYERS)
    assert "needs as many GPUs, and its instance has 1: move to" in migration.error
    assert cluster.launcher.processes == []
    cluster.launcher.devices = "3,5"
    await done(cluster.coordinator, LAYERS)


@pytest.mark.parametrize("held", ["preparing", "copying", "committing", "freeing"])
async def test_a_host_that_dies_takes_its_moves_and_guests_with_it(cluster, held):
    cluster.engine.held, cluster.engine.still = {held}, {"commit"} - {held}
    if held == "freeing":
        cluster.engine.still = set()
    migration = await cluster.coordinator.begin(LAYERS)
    await until(lambda: migration.moves[0].phase == held)
    cluster.d0.die()
    cluster.coordinator.instance_ended(cluster.d0.id)
    await cluster.coordinator.wait(migration.id)
    assert (migration.state, migration.error) == ("failed", "instance d0 has ended")
    await until(lambda: not list(cluster.coordinator.guests))
    assert cluster.launcher.processes[0].wait() == -signal.SIGKILL
    cluster.d0.restart()
    again = await done(cluster.coordinator, LAYERS)
    assert again.moves[0].phase == "done"
    assert list(cluster.d0.engine.units) == ["m2.0"]


@pytest.mark.parametrize("comes_back", [False, True], ids=["dead", "started again"])
async def test_a_migration_that_waits_ends_with_the_engine_it_was_planned_for(
    cluster, caplog, comes_back
):
    cluster.engine.held = {"preparing"}
    first = await cluster.coordinator.begin(LAYERS)
    second = await cluster.coordinator.begin(MoveLayers("d0", "p0", (0, 2)))
    await until(lambda: first.moves[0].phase == "preparing")
    cluster.d0.die()
    cluster.coordinator.instance_ended(cluster.d0.id)
    if comes_back:
        cluster.d0.restart()
    await cluster.coordinator.wait(second.id)
    assert (second.state, second.error) == ("failed", "instance d0 has ended")
    assert cluster.d0.engine.calls == ([] if comes_back else ["attach", "prepare"])
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("where", ["prepare", "precopy", "commit"])
async def test_a_host_that_stands_still_is_not_waited_for(cluster, monkeypatch, where):
    """It may go on later: what it has not begun by then is given up, and it is told."""
    monkeypatch.setattr(host_client, "CALL_TIMEOUT_S", 0.05)
    monkeypatch.setitem(move_plan._ALLOWED, "committing", (0.05, 1e12))
    cluster.engine.still = {where}
    migration = await run(cluster.coordinator, LAYERS)
    assert migration.state == "failed"
    assert migration.error == f"instance d0 has not answered {where} in 0 s"
    assert cluster.engine.calls[-1] == "abort"
    assert (cluster.engine.units, cluster.engine.pool_blocks) == ({}, 300)
    cluster.engine.still = set()
    await done(cluster.coordinator, LAYERS)


async def test_a_commit_that_is_never_answered_counts(cluster, monkeypatch):
    monkeypatch.setitem(move_plan._ALLOWED, "committing", (0.05, 1e12))
    cluster.engine.late = {"commit"}
    migration = await done(cluster.coordinator, LAYERS)
    assert "abort" not in cluster.engine.calls
    assert (list(cluster.engine.units), migration.blocks_gained) == (["m1.0"], 150)


@pytest.mark.parametrize("where", ["free", "freeing"])
async def test_what_fails_after_commit_leaves_the_unit_where_it_is(cluster, where):
    cluster.engine.faults = {where: "the kernel refuses"}
    migration = await run(cluster.coordinator, LAYERS)
    assert migration.state == "failed"
    assert migration.error == "layers 10:20 have moved all the same: the kernel refuses"
    assert "abort" not in cluster.engine.calls
    assert list(cluster.engine.units) == ["m1.0"]
    cluster.engine.faults = {}
    await done(cluster.coordinator, Return("d0"))
    assert (cluster.engine.units, cluster.engine.pool_blocks) == ({}, 300)


async def test_a_target_that_dies_keeps_its_guests(cluster):
    await done(cluster.coordinator, LAYERS)
    cluster.instances["p0"].die()
    cluster.coordinator.instance_ended("p0")
    assert cluster.launcher.processes[0].poll() is None
    await done(cluster.coordinator, Return("d0"))


# ---- looking after guests


@pytest.fixture
async def overseer(cluster: Any) -> AsyncIterator[GuestMonitor]:
    made = GuestMonitor(cluster.coordinator, idle_s=0.0)
    made.start()
    yield made
    await made.stop()


async def test_a_guest_that_is_lost_is_ended_and_its_pool_shrunk(cluster, overseer):
    await done(cluster.coordinator, LAYERS)
    (guest,) = cluster.coordinator.guests
    cluster.engine.busy = [2, 1]
    cluster.engine.lose(guest.id)
    await until(lambda: cluster.engine.pool_blocks == 300)
    await until(lambda: not list(cluster.coordinator.guests))
    assert cluster.launcher.processes[0].wait() == -signal.SIGKILL
    assert cluster.engine.guests == {}
    assert cluster.d0.placements == ()


async def test_a_guest_that_is_stopped_is_ended(cluster, overseer):
    await done(cluster.coordinator, LAYERS)
    process = cluster.launcher.processes[0]
    os.kill(process.pid, signal.SIGSTOP)
    await until(lambda: not list(cluster.coordinator.guests))
    assert process.wait() == -signal.SIGKILL


@pytest.mark.parametrize("asks", ["status", "share"])
async def test_a_host_that_stands_still_delays_no_look_at_others(
    cluster, overseer, monkeypatch, asks
):
    """It may wait for a guest that is stopped, and goes on once this one is ended."""
    monkeypatch.setattr(host_client, "CALL_TIMEOUT_S", 3600.0)
    p1 = cluster.instances["p1"].engine
    await done(cluster.coordinator, MoveLayers("p1", "p0", (10, 20)))
    await done(cluster.coordinator, LAYERS)
    theirs, own = cluster.launcher.processes
    cluster.engine.still = {asks}
    cluster.coordinator.guests.set_bound("p0", 0.5)  # the guests are told at the next look
    await until(lambda: list(p1.shares.values()) == [0.25])
    (lost,) = p1.guests
    p1.lose(lost)
    await until(lambda: theirs.poll() is not None)
    os.kill(own.pid, signal.SIGSTOP)
    await until(lambda: own.poll() is not None)


async def test_an_idle_guest_is_detached(cluster, overseer):
    await done(cluster.coordinator, LAYERS)
    assert "detach" not in cluster.engine.calls
    await done(cluster.coordinator, Return("d0"))
    await until(lambda: "detach" in cluster.engine.calls)


async def test_a_guest_that_dies_idle_is_forgotten_by_its_host(cluster, overseer):
    """Its host would keep the connection's descriptor and its view of the guest's memory."""
    overseer._idle_s = 1000.0
    await done(cluster.coordinator, LAYERS)
    await done(cluster.coordinator, Return("d0"))
    (guest,) = cluster.coordinator.guests
    cluster.launcher.processes[0].kill()
    await until(lambda: not list(cluster.coordinator.guests))
    cluster.engine.guests[guest.id] = {"state": "lost", "reason": "killed"}
    await until(lambda: cluster.engine.guests == {})


async def test_a_host_that_dies_while_it_is_looked_at_stops_no_other_look(cluster, caplog):
    await done(cluster.coordinator, LAYERS)
    monitor = GuestMonitor(cluster.coordinator)
    host_state = cluster.coordinator.hosts["d0"]

    async def dies(_: object) -> None:
        cluster.coordinator.instance_ended("d0")

    monitor._end_lost_guests = dies  # between two calls to the host
    await monitor._look(1)
    assert host_state.status is None
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("act", ["grow_pool", "shrink_pool"])
async def test_a_pool_whose_engine_ends_meanwhile_is_not_counted(cluster, act):
    await done(cluster.coordinator, LAYERS)
    host_state, resize = cluster.coordinator.hosts["d0"], cluster.engine.call_utility_async

    async def ends_after(method: str, *args: int) -> Any:
        reply = await resize(method, *args)
        if method == "banaserve_resize_pool":
            cluster.d0.die()
            cluster.coordinator.instance_ended("d0")
        return reply

    cluster.engine.call_utility_async = ends_after
    with pytest.raises(InstanceDeadError):
        await (host_state.grow_pool() if act == "grow_pool" else host_state.shrink_pool(300))
    assert host_state.grown_blocks == 0


async def test_a_pool_that_could_not_shrink_yet_is_still_counted_by_the_next_growth(cluster):
    """Else nobody would shrink it later: its memory is taken by blocks that are not the host's."""
    await done(cluster.coordinator, LAYERS)
    host_state, engine = cluster.coordinator.hosts["d0"], cluster.engine
    grown, num_at_start = engine.pool_blocks, host_state.kv.num_blocks
    assert grown > num_at_start
    engine.lose(next(iter(engine.guests)))
    engine.busy = [1]
    await host_state.refresh()
    assert await host_state.shrink_pool(num_at_start) == 1
    assert await host_state.grow_pool() == 0
    assert (engine.pool_blocks, host_state.grown_blocks) == (grown, grown - num_at_start)
    assert await host_state.shrink_pool(num_at_start) == 0
    assert (engine.pool_blocks, host_state.grown_blocks) == (num_at_start, 0)


async def test_the_target_counts_its_guests_and_the_host_what_is_away(cluster, overseer):
    await done(cluster.coordinator, LAYERS)
    await until(lambda: cluster.instances["p0"].guests[0] > 0)
    await until(lambda: cluster.d0.placements != ())
    assert metrics.UNITS_AWAY.labels("d0")._value.get() == 1
    (placement,) = cluster.d0.placements
    assert (placement.guest, placement.module.first_layer, placement.module.end_layer) == (
        "p0",
        10,
        20,
    )
    shown = await placement_of(cluster.coordinator)
    by_id = {instance.id: instance for instance in shown.instances}
    assert by_id["x0"].migration_blocker == "MLA cannot be moved"
    assert [unit.at for unit in by_id["d0"].units] == ["p0"]
    assert (by_id["d0"].num_blocks, by_id["d0"].blocks_gained) == (450, 150)
    assert [guest.target for guest in shown.guests] == ["p0"]
    cluster.d0.die()
    cluster.coordinator.instance_ended(cluster.d0.id)
    assert metrics.UNITS_AWAY.labels("d0")._value.get() == 0
