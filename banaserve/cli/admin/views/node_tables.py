"""Nodes in tables: a column in the table of instances, and a separate table."""

from __future__ import annotations

from collections.abc import Sequence

from banaserve.contracts.instances import NodeStatus
from banaserve.kvstore.sizes import format_size

_HEADING = ("NODE", "STATE", "INSTANCES", "ROOM FOR", "GPUS", "MEMORY", "PROBLEM")


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
    return [_HEADING, *(_row(node) for node in nodes)]


def _row(node: NodeStatus) -> tuple[str, ...]:
    return (
        node.name,
        node.state,
        ", ".join(node.instances) or "-",
        str(max(0, node.num_free)),
        str(node.num_gpus) if node.num_gpus else "-",
        format_size(node.memory_bytes),
        node.problem or "-",
    )
