"""Column of nodes in tables of instances."""

from __future__ import annotations

from collections.abc import Sequence


def with_nodes(rows: Sequence[tuple[str, ...]], nodes: Sequence[str]) -> list[tuple[str, ...]]:
    """Put the node of each instance after its id, where any has one.

    Args:
        rows: A heading, and rows that begin with an instance's id, or nothing.
        nodes: Of each row but the heading.
    """
    if not any(nodes):
        return list(rows)
    return [
        (row[0], node if row[0] else "", *row[1:])
        for row, node in zip(rows, ("NODE", *nodes), strict=True)
    ]
