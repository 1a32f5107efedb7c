"""Tables of instances on several nodes."""

from __future__ import annotations

from banaserve.cli.admin import placement, status
from banaserve.cli.admin.status import node_rows
from banaserve.contracts.control_api import (
    ControllerState,
    ControllerStatus,
    InstanceStatus,
    ServerStatus,
)
from banaserve.contracts.instances import NodeStatus
from banaserve.contracts.migration_api import (
    ClusterPlacement,
    InstancePlacement,
    LayersModules,
    UnitPlace,
)


def server(*nodes: str) -> ServerStatus:
    instances = [
        InstanceStatus(f"p{i}", "prefill", "ready", 0, 0, node=node) for i, node in enumerate(nodes)
    ]
    controller = ControllerStatus(ControllerState.RUNNING, "off", "", 1.0)
    return ServerStatus(0.0, instances, [], controller, "load_aware", "")


def test_a_server_of_one_machine_has_no_column_of_nodes() -> None:
    heading, row = status.instance_rows(server(""))
    assert "NODE" not in heading
    assert (row[0], row[1]) == ("p0", "prefill")


def test_nodes_stand_beside_their_instances() -> None:
    rows = status.instance_rows(server("10.0.0.1:8476", "10.0.0.2:8476"))
    assert [row[:3] for row in rows] == [
        ("INSTANCE", "NODE", "ROLE"),
        ("p0", "10.0.0.1:8476", "prefill"),
        ("p1", "10.0.0.2:8476", "prefill"),
    ]


def test_what_is_away_stands_below_its_host() -> None:
    unit = UnitPlace("u", LayersModules(4, 8), "p0", "g", 1, 9, "layers 4:8", [4, 5, 6, 7])
    host = InstancePlacement("d0", "decode", "ready", "", units=[unit], num_layers=8, node="n:1")
    lost = InstancePlacement("d1", "decode", "down", "it has ended", node="n:2")
    rows = placement.rows(ClusterPlacement([host, lost], [], []))
    assert [row[:4] for row in rows] == [
        ("INSTANCE", "NODE", "ROLE", "RUNS"),
        ("d0", "n:1", "decode", "layers 0:4"),
        ("", "", "", unit.words),
        ("d1", "n:2", "decode", "it has ended"),
    ]
    assert {len(row) for row in rows} == {8}


def test_each_node_says_what_it_has_and_why_it_is_away() -> None:
    rows = node_rows(
        [
            NodeStatus("a:1", "ready", ["p0", "d0"], 1, 8, 1 << 30),
            NodeStatus("b:1", "away", [], -1, 0, 3 << 30, "node b:1 is gone"),
        ]
    )
    assert rows == [
        ("NODE", "STATE", "INSTANCES", "ROOM FOR", "GPUS", "MEMORY", "PROBLEM"),
        ("a:1", "ready", "p0, d0", "1", "8", "1 GiB", "-"),
        ("b:1", "away", "-", "0", "-", "3 GiB", "node b:1 is gone"),
    ]
