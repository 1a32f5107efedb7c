"""Nodes in tables: a column in the table of instances, and a separate table."""

from __future__ import annotations

from collections.abc import Sequence

from banaserve.cli.terminal.console import Columns, rows_of
from banaserve.contracts.instances import NodeStatus
from banaserve.kvstore.sizes import format_size

_COLUMNS: Columns[NodeStatus] = {
    "NODE": lambda one: one.name,
    "STATE": lambda one: one.state,
    "INSTANCES": lambda one: ", ".join(one.instances) or "-",
    "ROOM FOR": lambda one: str(max(0, one.num_free)),
    "GPUS": lambda one: str(one.num_gpus or "-"),
    "MEMORY": lambda one: format_size(one.memory_bytes),
    "PROBLEM": lambda one: one.problem or "-",
}


def with_nodes(rows: Sequence[tuple[str, ...]], nodes: Sequence[str]) -> list[tuple[str, ...]]:
    """Insert the node of each instance after its id, if any instance has a node.

    Args:
        rows: Heading, and rows that begin with an instance's id or an empty cell.
        nodes: Node of each row except the heading.
    """
    if not any(nodes):
        return list(rows)
    return [
        (row[0], node if row[0] else "", *row[1:])
        for row, node in zip(rows, ("NODE", *nodes), strict=True)
    ]


def node_rows(nodes: Sequence[NodeStatus]) -> list[tuple[str, ...]]:
    """Return a heading, and a row for each node."""
    return rows_of(_COLUMNS, nodes)
