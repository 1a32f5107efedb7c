"""Scaling: the plan as a table, and what becomes of instances that start, fail and leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from prometheus_client import REGISTRY

import executor_doubles as doubles
from banaserve.base.clock import WallClock
from banaserve.base.errors import BanaServeError, MigrationError, UserError
from banaserve.base.types import ClusterView, InstanceId, InstanceReport, InstanceView, Role
from banaserve.contracts.migration_api import MoveLayers
from banaserve.orchestrator.control.autoscaling import AutoscaleOptions, LoadsSince, next_step
from banaserve.serving.instances import factory as factories
from banaserve.serving.launch.devices import Devices
from banaserve.serving.launch.launcher import SpawnLauncher
from banaserve.serving.monitoring import metrics
from banaserve.serving.moves import guest_monitor
from banaserve.serving.operations.autoscaler import Autoscaler
from banaserve.serving.operations.roles import Drains
from banaserve.serving.operations.scale_plan import (
    InstanceCounts,
    plan_leaving,
    plan_scaling,
)
from migration_doubles import LAYERS, done
from scaling_doubles import Factory, scaler_of
from waiting import turns, until

ROLES = {"p": Role.PREFILL, "d": Role.DECODE, "c": Role.COLOCATED}


def members(text: str) -> list[InstanceView]:
    """``p0:3 d0/p d1!``: p0 has three requests, d0 is for prefill, d1 takes none."""
    found = []
    for word in text.split():
        name, _, num_requests = word.rstrip("!").partition(":")
        name, _, role = name.partition("/")
        role, ready = ROLES[role or name[0]], not word.endswith("!")
        found.append(
            InstanceView(InstanceId(name), role, ready, None, int(num_requests or 0), 0, 1.0)
        )
    return found


Numbers = tuple[int | None, int | None, int | None, int | None]


@pytest.mark.parametrize(
    ("there", "wanted", "add", "remove"),
    [
        ("p0 d0", (1, 1), "", ""),
        ("p0 d0", (3, 2), "p1 p2 d1", ""),
        ("p0 p1 d0 d1", (1, 2), "", "p1"),
        ("p0 p1 d0 d1", (3, 1), "p2", "d1"),
        ("p0 p1:2 d0", (1, 1), "", "p0"),
        ("p0:1 p1 p2 d0", (1, 1), "", "p2 p1"),
        ("p0:5! p1 d0", (1, 1), "", "p0"),
        ("p0 p1/d d0", (1, 1), "", "d0"),
        ("p0 p1/d d0:1", (1, 1), "", "p1"),
        ("p0 d0", (0, 0, 2), "c0 c1", "p0 d0"),
        ("c0 c1", (1, 1, 0), "p0 d0", "c1 c0"),
        ("c0 c1", (None, None, 3), "c2", ""),
        ("c0 c1", (0, 0, 1), "", "c1"),
        ("p0 d0", (2, None), "p1", ""),
        ("p0 d0 c0", (0, 0), "", "p0 d0"),
        ("p0 d0!", (2, 1), "p1", ""),
        ("c0 c1", (None, None, None, 4), "c2 c3", ""),
        ("c0/p c1/p c2/d", (None, None, None, 2), "", "c1"),
        ("c0/p c1/p:4 c2/d", (None, None, None, 2), "", "c0"),
        ("c0/p c1/d c2", (None, None, None, 1), "", "c1 c0"),
        ("c0/p c1/d! c2/d", (None, None, None, 2), "", "c1"),
    ],
)
def test_what_is_added_and_removed(there: str, wanted: Numbers, add: str, remove: str) -> None:
    present = members(there)
    plan = plan_scaling(present, InstanceCounts(*wanted), [one.id for one in present])
    assert [name for name, _ in plan.add] == add.split()
    assert [role for _, role in plan.add] == [ROLES[name[0]] for name in add.split()]
    assert list(plan.remove) == remove.split()


def test_no_id_is_used_again() -> None:
    plan = plan_scaling(members("p0 d0"), InstanceCounts(2, 2), ["p0", "d0", "p7", "d1", "store"])
    assert [name for name, _ in plan.add] == ["p8", "d2"]


@pytest.mark.parametrize(
    ("there", "wanted", "error", "said"),
    [
        ("p0 d0", (), UserError, "say how many"),
        ("p0 d0", (0, 1), UserError, "0:1 leaves no instance to serve prefill"),
        ("p0 d0", (1, 0), UserError, "1:0 leaves no instance to serve decode"),
        ("p0 d0", (None, 0), UserError, "1:0 leaves no instance to serve decode"),
        ("c0", (None, None, 0), UserError, "leaves no instance"),
        ("p0 d0", (-1, 1), UserError, "give 0 to 999"),
        ("p0 d0", (1, 1000), UserError, "give 0 to 999"),
        ("p0 d0", (1, None, None, 2), UserError, "give it alone"),
        ("c0", (None, None, None, 0), UserError, "give 1 or more"),
        ("c0/p c1/d", (None, None, None, 1), UserError, "1 leaves c0 .prefill.: give one more"),
        ("p0 d0! d1! d2", (1, 1, 0), None, ""),
        ("p0 p1 d0!", (1, 1), MigrationError, "decode would be left to d0, which is drained"),
    ],
)
def test_what_is_refused(
    there: str, wanted: Numbers, error: type[BanaServeError] | None, said: str
) -> None:
    present = members(there)

    def planned() -> Any:
        return plan_scaling(present, InstanceCounts(*wanted), [one.id for one in present])

    if error is None:
        assert planned().remove == ("d1", "d0")
        return
    with pytest.raises(error, match=said):
        planned()


@pytest.mark.parametrize(
    ("there", "leaving", "added", "add", "remove", "refusal"),
    [
        ("p0 p1 d0 d1", "p1 d1", "same", "p2 d2", "d1 p1", ""),
        ("p0 p1 d0 d1", "p1 d1", "", "", "d1 p1", ""),
        ("p0 p1:2 d0 d1:1", "p1 d1", "", "", "d1 p1", ""),
        ("p0 d0 c0", "c0", "both", "c1", "c0", ""),
        ("p0 p1/d d0", "p1", "same", "d1", "p1", ""),
        ("p0 p1/d d0", "p1", "both", "c0", "p1", ""),
        ("p0 d0", "", "same", "", "", ""),
        ("p0 p1 d0", "d0", "", "", "", "decode would be left to nobody"),
        ("p0 p1 d0", "d0", "same", "d1", "d0", ""),
        ("p0 p1! d0", "p0", "", "", "", "prefill would be left to p1, which is drained"),
    ],
)
def test_what_leaves_with_its_node(
    there: str, leaving: str, added: str, add: str, remove: str, refusal: str
) -> None:
    present = members(there)
    roles = {"same": lambda role: role, "both": lambda _: Role.COLOCATED, "": None}

    def planned() -> Any:
        ids = [one.id for one in present]
        return plan_leaving(present, leaving.split(), ids, roles[added])

    if refusal:
        with pytest.raises(MigrationError, match=refusal):
            planned()
        return
    plan = planned()
    assert [name for name, _ in plan.add] == add.split()
    assert list(plan.remove) == remove.split()


# ---- what becomes of them


class Served:
    """Instances d0, p0, p1 and x0, for decode too, that a scaler adds to and removes from."""

    def __init__(self, folder: Path, **options: bool) -> None:
        self.world = doubles.World(folder)
        self.drains = Drains(self.world.instances, self.world.roles)
        self.factory = Factory()
        self.scaler = scaler_of(self.world, self.drains, self.factory, **options)

    async def scaled(self, *wanted: int | None, timeout_s: float = 20.0) -> Any:
        begun = self.scaler.begin(InstanceCounts(*wanted), timeout_s)
        return await self.scaler.wait(begun.id, 30.0)

    @property
    def ids(self) -> list[str]:
        assert list(self.world.instances) == list(self.world.cluster.coordinator.hosts)
        return list(self.world.instances)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    one = Served(tmp_path)
    one.world.overseer.start()
    yield one
    await one.scaler.stop()
    await one.world.roles.stop()
    await one.world.overseer.stop()
    await one.world.cluster.close()


async def test_it_grows_and_shrinks(served: Served) -> None:
    grown = await served.scaled(3, 3)
    assert (grown.state, grown.added, served.ids) == (
        "done",
        ["p2", "d1"],
        ["d0", "p0", "p1", "x0", "p2", "d1"],
    )
    served.world.instances[InstanceId("d1")].inflight_requests = 2
    shrunk = await served.scaled(1, 1)
    assert (shrunk.state, shrunk.removed) == ("done", ["p2", "p1", "x0", "d0"])
    assert (served.ids, served.factory.discarded) == (["p0", "d1"], shrunk.removed)
    again = await served.scaled(2, 1)
    assert (again.added, served.ids) == (["p3"], ["p0", "d1", "p3"])


async def test_a_start_that_fails_leaves_nothing(served: Served) -> None:
    served.factory.may_start.clear()
    scaling = served.scaler.begin(InstanceCounts(3, 3), 20.0)
    await until(lambda: len(served.factory.made) == 2)
    served.factory.made[0].kill()
    ended = await served.scaler.wait(scaling.id, 30.0)
    assert (ended.state, ended.added) == ("failed", [])
    assert ended.reason == "instance p2 ended while starting: no more memory"
    assert all(one.is_killed.is_set() for one in served.factory.made)
    assert (served.ids, served.factory.discarded) == (["d0", "p0", "p1", "x0"], ["p2", "d1"])


async def test_what_has_no_devices_is_not_begun(served: Served) -> None:
    served.factory.num_devices = 1
    failed = await served.scaled(4, 2)
    assert (failed.state, failed.reason) == ("failed", "no GPUs are left")
    assert (served.ids, served.factory.discarded) == (["d0", "p0", "p1", "x0"], ["p2", "p3"])


async def test_one_at_a_time_and_it_can_be_given_up(served: Served) -> None:
    served.factory.may_start.clear()
    scaling = served.scaler.begin(InstanceCounts(3, 1), 20.0)
    with pytest.raises(MigrationError, match="scaling s1 to 3:1 is under way"):
        served.scaler.begin(InstanceCounts(1, 1), 20.0)
    served.scaler.abort(scaling.id)
    assert (await served.scaler.wait(scaling.id, 30.0)).state == "aborted"
    assert served.ids == ["d0", "p0", "p1", "x0"]
    served.factory.may_start.set()
    assert (await served.scaled(2, 3)).state == "done"


async def test_what_is_left_stays_and_serves(served: Served) -> None:
    p0, p1 = (served.world.instances[InstanceId(name)] for name in ("p0", "p1"))
    p0.inflight_requests, p1.inflight_requests, p1.keeps_streams = 2, 1, True
    late = await served.scaled(1, 2, timeout_s=0.05)
    assert (late.state, late.reason) == ("failed", "1 requests are left on p1: it stays")
    assert (p1.service.is_drained, served.ids) == (False, ["d0", "p0", "p1", "x0"])
    begun = served.scaler.begin(InstanceCounts(1, 2), 20.0)
    await until(lambda: p1.service.is_drained)
    served.scaler.abort(begun.id)
    assert (await served.scaler.wait(begun.id, 30.0)).state == "aborted"
    assert not p1.service.is_drained


async def test_modules_beside_one_that_leaves_come_home_first(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guest_monitor, "_END_S", 0.01)
    coordinator = served.world.cluster.coordinator
    await done(coordinator, LAYERS)
    served.world.instances[InstanceId("p1")].inflight_requests = 1
    ended = await served.scaled(1, 2)
    assert (ended.state, ended.removed, ended.reason) == ("done", ["p0"], "")
    assert served.world.engine.units == {}
    assert served.ids == ["d0", "p1", "x0"]


async def test_what_one_that_leaves_has_away_ends_with_it(served: Served) -> None:
    coordinator = served.world.cluster.coordinator
    await done(coordinator, MoveLayers("p1", "d0", (10, 20)))
    assert [guest.target for guest in coordinator.guests] == ["d0"]
    served.world.instances[InstanceId("p0")].inflight_requests = 1
    ended = await served.scaled(1, 2)
    assert (ended.state, ended.removed, list(coordinator.guests)) == ("done", ["p1"], [])


async def test_one_whose_modules_cannot_come_home_stays(served: Served) -> None:
    coordinator = served.world.cluster.coordinator
    await done(coordinator, LAYERS)
    served.world.instances[InstanceId("p1")].inflight_requests = 1
    served.world.engine.faults["move_on"] = "no room at home"
    ended = await served.scaled(1, 2)
    assert ended.state == "failed"
    assert "of d0 cannot come home from p0: " in ended.reason
    assert (served.world.instances[InstanceId("p0")].service.is_drained, served.ids[1]) == (
        False,
        "p0",
    )
    await done(coordinator, MoveLayers("d0", "p0", (0, 2)))  # it may take modules again


async def test_nothing_moves_to_one_that_leaves(served: Served) -> None:
    p1 = served.world.instances[InstanceId("p1")]
    coordinator = served.world.cluster.coordinator
    await coordinator.vacate(p1.id)
    for ask in (MoveLayers("d0", "p1", (0, 2)), MoveLayers("p1", "d0", (0, 2))):
        with pytest.raises(MigrationError, match="instance p1 is being removed"):
            await coordinator.begin(ask)


@pytest.mark.parametrize("leaving", ["d0", "p1"])
async def test_a_move_whose_host_is_asked_while_one_leaves_does_not_begin(
    served: Served, leaving: str
) -> None:
    coordinator = served.world.cluster.coordinator
    beginning = asyncio.create_task(coordinator.begin(MoveLayers("d0", "p1", (0, 2))))
    await turns(coordinator.hosts[InstanceId("d0")].planning.locked)
    await coordinator.vacate(InstanceId(leaving))
    with pytest.raises(MigrationError, match=f"instance {leaving} is being removed"):
        await beginning


async def test_roles_that_switch_and_roles_that_follow_the_load(tmp_path: Path) -> None:
    fixed, free = Served(tmp_path), Served(tmp_path, roles_follow_load=True)
    with pytest.raises(UserError, match="the roles are fixed"):
        fixed.scaler.begin(InstanceCounts(total=3), 20.0)
    with pytest.raises(UserError, match="roles follow the load"):
        free.scaler.begin(InstanceCounts(1, 1), 20.0)
    for one in (fixed, free):
        one.world.instances[InstanceId("p1")].inflight_requests = 1
        one.world.roles.begin("p1", "decode", 20.0)
    with pytest.raises(MigrationError, match="switching its role"):
        fixed.scaler.begin(InstanceCounts(1, 1), 20.0)
    shrinking = free.scaler.begin(InstanceCounts(total=3), 20.0)
    await until(lambda: "role switch" in shrinking.now)
    free.world.instances[InstanceId("p1")].inflight_requests = 0
    assert (await free.scaler.wait(shrinking.id, 30.0)).removed == ["x0"]
    grown = await free.scaled(None, None, None, 4)
    assert [free.world.instances[InstanceId(name)].role for name in grown.added] == [Role.COLOCATED]
    for one in (fixed, free):
        await one.scaler.stop()
        await one.world.roles.stop()
        await one.world.cluster.close()


async def test_without_a_store_nothing_is_split(tmp_path: Path) -> None:
    one = Served(tmp_path, has_store=False)
    with pytest.raises(UserError, match="no KV cache store"):
        one.scaler.begin(InstanceCounts(1, 1), 20.0)
    await one.world.cluster.close()


# ---- by load

OPTIONS = AutoscaleOptions(least=2, most=4, grow_after_s=10.0, shrink_after_s=20.0)


def seen(now_s: float, text: str) -> ClusterView:
    """``p0:90 d0:20 d1!``: p0 is at 90 %, d1 has not reported."""
    views = {}
    for word in text.split():
        name, _, percent = word.rstrip("!").partition(":")
        at_s = now_s - 60.0 if word.endswith("!") else now_s
        report = InstanceReport(1, 0, int(percent or 0) / 100, 0.0, at_s)
        name_id = InstanceId(name)
        views[name_id] = InstanceView(name_id, ROLES[name[0]], True, report, 0, 0, 1.0)
    return ClusterView(now_s, views)


@pytest.mark.parametrize(
    ("looks", "step"),
    [
        ({0: "p0:90 d0:20", 10: "p0:85 d0:20"}, (Role.PREFILL, 1)),
        ({0: "p0:90 d0:95", 10: "p0:90 d0:95"}, (Role.DECODE, 1)),
        ({0: "p0:90 d0:20", 9: "p0:90 d0:20"}, None),
        ({0: "p0:90 d0:20", 5: "p0:70 d0:20", 10: "p0:90 d0:20"}, None),
        ({0: "p0:90 d0:20 d1:20 d2:20", 10: "p0:90 d0:20 d1:20 d2:20"}, None),
        ({0: "p0:70 p1:95 d0:20", 10: "p0:70 p1:95 d0:20"}, (Role.PREFILL, 1)),
        ({0: "p0:90 p1! d0:20", 10: "p0:90 p1! d0:20"}, None),
        ({0: "p0:20 p1:20 d0:60", 20: "p0:20 p1:20 d0:60"}, (Role.PREFILL, -1)),
        ({0: "p0:20 p1:20 d0:60", 19: "p0:20 p1:20 d0:60"}, None),
        ({0: "p0:30 p1:30 d0:60", 20: "p0:30 p1:30 d0:60"}, None),
        ({0: "p0:10 d0:10", 20: "p0:10 d0:10"}, None),
        ({0: "p0:10 p1:10 d0:90", 20: "p0:10 p1:10 d0:90"}, (Role.DECODE, 1)),
    ],
)
def test_a_load_that_lasts_changes_the_number(
    looks: dict[float, str], step: tuple[Role, int] | None
) -> None:
    found, since = None, LoadsSince()
    for now_s, text in looks.items():
        found, since = next_step(seen(now_s, text), OPTIONS, since, by_role=True)
    assert (found and (found.role, found.change)) == step


def test_what_grew_does_not_shrink_at_once() -> None:
    """At every number of instances the level of one less lies below that of one more."""
    for number in range(1, 20):
        load = OPTIONS.grow_above * number / (number + 1)
        text = " ".join(f"p{n}:{int(100 * load)}" for n in range(number + 1)) + " d0:60"
        _, since = next_step(seen(0.0, text), OPTIONS, LoadsSince(), by_role=True)
        assert Role.PREFILL not in since.low


async def test_an_instance_is_added_under_load_unless_a_person_has_paused_it(
    served: Served,
) -> None:
    may_act = [False]
    looks = 0

    def view() -> ClusterView:
        nonlocal looks
        looks += 1
        shown = [f"{name}:99" for name in served.world.instances if name != "x0"]
        return seen(float(looks), " ".join([*shown, "d9:99"]))

    options = AutoscaleOptions(1, 5, grow_after_s=1.0)
    autoscaler = Autoscaler(
        served.scaler, view, lambda: may_act[0], options, WallClock(), 0.001, by_role=True
    )
    autoscaler.start()
    await until(lambda: looks > 5)
    assert served.scaler.recent() == []
    may_act[0] = True
    await until(lambda: len(served.ids) == 5)
    (scaling,) = served.scaler.recent()
    assert (scaling.why, scaling.added) in [("prefill at 99%", ["p2"]), ("decode at 99%", ["d1"])]
    await autoscaler.stop()


async def test_only_a_person_scales_while_engines_are_paused(served: Served) -> None:
    served.world.instances[InstanceId("d0")].is_paused = True
    with pytest.raises(MigrationError, match="sleep or are paused"):
        served.scaler.begin(InstanceCounts(3), 20.0, "prefill at 99%")
    assert (await served.scaled(3, None)).state == "done"


# ---- what an instance has of its own


def test_devices_that_nobody_has_are_taken_and_given_back() -> None:
    devices = Devices({"p0": "0,1", "d0": "2,3"}, [str(n) for n in range(7)], 2)
    devices.reserve("p0")
    devices.reserve("p1")
    assert (devices.of("p0"), devices.of("p1")) == ("0,1", "4,5")
    with pytest.raises(MigrationError, match=r"needs 2 GPUs .* of the 7 .* 1 are free"):
        devices.reserve("p2")
    assert devices.of("p2") is None
    devices.release("d0")
    devices.reserve("d1")
    assert devices.of("d1") == "2,3"


def test_shared_devices_are_free_when_the_last_has_gone() -> None:
    devices = Devices({"p0": "0", "d0": "0"}, ["0"], 1)
    devices.release("d0")
    with pytest.raises(MigrationError, match="0 are free"):
        devices.reserve("d1")
    devices.release("p0")
    devices.reserve("d1")


def test_the_first_instance_of_a_node_that_has_joined_has_devices_too() -> None:
    devices = Devices({}, ["3", "4", "5"], 2)
    devices.reserve("d7")
    assert devices.of("d7") == "3,4"


def test_a_cpu_has_no_devices_to_run_out_of() -> None:
    devices = Devices({})
    devices.reserve("p1")
    assert devices.of("p1") is None


def test_more_instances_need_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factories, "available_memory_bytes", lambda: 3 << 30)
    nothing: Any = None
    here = SpawnLauncher([], devices=Devices({}))
    one = factories.InstanceFactory(nothing, here, nothing, nothing, instance_bytes=1 << 30)
    one.check_memory(3)
    with pytest.raises(MigrationError, match="4 more instances need about 4 GiB"):
        one.check_memory(4)


def test_more_instances_need_room_on_the_nodes() -> None:
    nothing: Any = None
    nodes: Any = SimpleNamespace(num_free_places=lambda: 2)
    one = factories.InstanceFactory(nothing, nodes, nothing, nothing, instance_bytes=1 << 60)
    one.check_memory(2)
    with pytest.raises(MigrationError, match="3 more instances, and the nodes have room for 2"):
        one.check_memory(3)


def test_what_has_gone_has_no_series() -> None:
    metrics.IN_FLIGHT.labels("test-gone").set(1)
    metrics.UP.labels("test-gone", "decode").set(1)
    metrics.count_transfers("test-gone", {"steps": 1.0, "decided_compute": 1.0})
    metrics.forget("test-gone")
    assert not any(
        sample.labels.get("instance_id") == "test-gone"
        for family in REGISTRY.collect()
        for sample in family.samples
    )
    metrics.count_transfers("test-gone", {"steps": 2.0})
    assert REGISTRY.get_sample_value("banaserve_steps_total", {"instance_id": "test-gone"}) == 2.0
