"""Nodes that join and leave a server, with the instances that start elsewhere and are drained."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import executor_doubles as doubles
from banaserve.base.clock import WallClock
from banaserve.base.errors import MigrationError, UserError
from banaserve.base.types import InstanceId, Role
from banaserve.contracts.instances import NodeChange
from banaserve.serving.operations import node_changes
from banaserve.serving.operations.node_changes import NodeChanges
from banaserve.serving.operations.roles import Drains
from banaserve.serving.operations.scale_plan import InstanceCounts
from scaling_doubles import Cluster, Factory, Machines, scaler_of
from waiting import until


class Served:
    """Instances d0, p0, p1 and x0, for decode too, on nodes."""

    def __init__(self, folder: Path, **on: str) -> None:
        self.world = doubles.World(folder)
        self.machines = Machines(**on)
        self.factory = Factory(self.machines)
        drains = Drains(self.world.instances, self.world.roles)
        self.scaler = scaler_of(self.world, drains, self.factory)
        cluster: Any = Cluster(self.world)
        launcher: Any = self.machines
        self.changes = NodeChanges(launcher, self.scaler, cluster, WallClock())
        self.world.overseer.start()

    async def added(self, name: str) -> NodeChange:
        return await self.changes.wait(self.changes.begin_add(name).id, 30.0)

    async def removed(
        self, name: str, *, timeout_s: float = 20.0, are_replaced: bool = True
    ) -> NodeChange:
        begun = self.changes.begin_remove(name, timeout_s, are_replaced=are_replaced)
        return await self.changes.wait(begun.id, 30.0)

    def instance(self, name: str) -> Any:
        return self.world.instances[InstanceId(name)]

    async def close(self) -> None:
        await self.changes.stop()
        await self.scaler.stop()
        await self.world.roles.stop()
        await self.world.overseer.stop()
        await self.world.cluster.close()


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    one = Served(tmp_path, a="d0 p0", b="p1 x0")
    yield one
    await one.close()


async def test_one_that_joins_is_where_the_next_instance_starts(served: Served) -> None:
    done = await served.added("c")
    assert (done.state, done.node, done.reason) == ("done", "c", "")
    assert served.machines.asked == [("c", ("--model", "newest"))]
    begun = served.scaler.begin(InstanceCounts(prefill=3), 20.0)
    await served.scaler.wait(begun.id, 30.0)
    assert served.machines.on == {"a": ["d0", "p0"], "b": ["p1", "x0"], "c": ["p2"]}


async def test_one_that_leaves_is_drained_once_others_serve(served: Served) -> None:
    served.factory.may_start.clear()
    begun = served.changes.begin_remove("b", 20.0, are_replaced=True)
    await until(lambda: len(served.factory.made) == 2)
    assert not served.instance("p1").service.is_drained, "it serves while others start"
    assert [node.state for node in served.changes.nodes()] == ["ready", "leaving"]
    served.factory.may_start.set()
    done = await served.changes.wait(begun.id, 30.0)
    assert (done.state, done.reason) == ("done", "")
    assert served.machines.on == {"a": ["d0", "p0", "p2", "d1"]}
    roles = {name: one.role for name, one in served.world.instances.items()}
    assert (roles[InstanceId("p2")], roles[InstanceId("d1")]) == (Role.PREFILL, Role.DECODE)
    assert set(roles) == {"d0", "p0", "p2", "d1"}


async def test_a_server_may_do_with_fewer(served: Served) -> None:
    done = await served.removed("b", are_replaced=False)
    assert (done.state, served.factory.made) == ("done", [])
    assert served.machines.on == {"a": ["d0", "p0"]}


async def test_streams_that_do_not_end_keep_the_node(served: Served) -> None:
    p1 = served.instance("p1")
    p1.inflight_requests, p1.keeps_streams = 2, True
    late = await served.removed("b", timeout_s=0.05, are_replaced=False)
    assert (late.state, late.reason) == (
        "failed",
        "node b has instances still: 2 requests are left on p1: it stays",
    )
    assert (p1.service.is_drained, [node.state for node in served.changes.nodes()]) == (
        False,
        ["ready"] * 2,
    )
    begun = served.changes.begin_remove("b", 20.0, are_replaced=False)
    await until(lambda: p1.service.is_drained)
    served.changes.abort(begun.id)
    assert (await served.changes.wait(begun.id, 30.0)).state == "aborted"
    assert (p1.service.is_drained, [node.state for node in served.changes.nodes()]) == (
        False,
        ["ready"] * 2,
    )
    assert served.scaler.recent()[-1].state == "aborted"


async def test_one_that_is_being_given_back_leaves(served: Served) -> None:
    served.machines.may_leave.clear()
    begun = served.changes.begin_remove("b", 20.0, are_replaced=False)
    await until(lambda: "b" not in served.machines.on)
    with pytest.raises(MigrationError, match="node b is being given back: too late to abort"):
        served.changes.abort(begun.id)
    served.machines.may_leave.set()
    assert (await served.changes.wait(begun.id, 30.0)).state == "done"


async def test_no_room_elsewhere_keeps_the_node(served: Served) -> None:
    served.factory.num_devices = 1
    failed = await served.removed("b")
    assert (failed.state, failed.reason) == (
        "failed",
        "node b has instances still: no GPUs are left",
    )
    assert set(served.world.instances) == {"d0", "p0", "p1", "x0"}


@pytest.mark.parametrize(
    ("on", "name", "replaced", "error", "said"),
    [
        ({"a": "d0 p0 p1 x0"}, "a", True, MigrationError, "node a is the server's last one"),
        ({"a": "", "b": ""}, "z", True, UserError, "there is no node z"),
        (
            {"a": "p0 p1", "b": "d0 x0"},
            "b",
            False,
            MigrationError,
            "node b has instances still .d0, x0.: decode would be left to nobody",
        ),
    ],
)
async def test_what_cannot_leave(
    tmp_path: Path,
    on: dict[str, str],
    name: str,
    replaced: bool,
    error: type[Exception],
    said: str,
) -> None:
    served = Served(tmp_path, **on)
    with pytest.raises(error, match=said):
        served.changes.begin_remove(name, 20.0, are_replaced=replaced)
    assert {node.state for node in served.changes.nodes()} == {"ready"}
    assert served.changes.recent() == []
    await served.close()


async def test_an_empty_node_and_one_without_engines_of_this_server(tmp_path: Path) -> None:
    served = Served(tmp_path, a="d0 p0 p1 x0", b="")
    assert (await served.removed("b")).state == "done"
    assert served.scaler.recent() == []
    served.machines.on.clear()
    with pytest.raises(UserError, match="its own machine: nodes join one that was started with"):
        served.changes.begin_add("c")
    await served.close()


async def test_one_at_a_time_and_a_join_can_be_given_up(served: Served) -> None:
    served.machines.may_join.clear()
    begun = served.changes.begin_add("c")
    await until(lambda: begun.now == "looking for c")
    with pytest.raises(MigrationError, match="node c is joining: wait for the end of n1"):
        served.changes.begin_remove("b", 20.0, are_replaced=True)
    served.changes.abort(begun.id)
    ended = await served.changes.wait(begun.id, 30.0)
    assert (ended.state, ended.now, list(served.machines.on)) == ("aborted", "", ["a", "b"])
    with pytest.raises(MigrationError, match="n1 is aborted: nothing to abort"):
        served.changes.abort(begun.id)
    served.scaler.begin(InstanceCounts(prefill=3), 20.0)
    with pytest.raises(MigrationError, match=r"node b has instances still .*s1 to 3:\* is under"):
        served.changes.begin_remove("b", 20.0, are_replaced=True)


async def test_what_the_cluster_gains_joins(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(node_changes, "LOOK_S", 0.005)
    served.machines.unusable["c"] = "node c: it has another cluster key"
    served.machines.new = ["c", "d"]
    served.changes.start()
    await until(lambda: "d" in served.machines.on)
    await until(lambda: not any(one.is_open for one in served.changes.recent()))
    ended = {one.node: (one.state, one.why) for one in served.changes.recent()}
    why = "the cluster has gained it"
    assert ended == {"c": ("failed", why), "d": ("done", why)}
    assert "node c, which the cluster has gained, is not used: node c: it has an" in caplog.text
    looked = served.machines.num_looks
    await until(lambda: served.machines.num_looks > looked + 2)
    assert len(served.changes.recent()) == 2, "what cannot join is not tried again and again"
