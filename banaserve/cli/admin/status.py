"""Nodes in tables: a column in the table of instances, and a separate table."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from banaserve.base.arguments import Rule, option
from banaserve.base.text.printable import printable
from banaserve.cli.admin.options import JsonOptions
from banaserve.cli.app import App
from banaserve.cli.terminal.console import Columns, make_table, print_json, print_rows, rows_of
from banaserve.contracts.control_api import ControllerStatus, InstanceStatus, MoveLine, ServerStatus
from banaserve.contracts.instances import NodeStatus
from banaserve.kvstore.sizes import format_size

if TYPE_CHECKING:
    from rich.console import Group


_NODE_COLUMNS: Columns[NodeStatus] = {
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
    return rows_of(_NODE_COLUMNS, nodes)


_COLUMNS: Columns[InstanceStatus] = {
    "INSTANCE": lambda one: one.id,
    "ROLE": lambda one: one.role,
    "STATE": lambda one: one.state,
    "COMPUTE": lambda one: "-" if one.compute is None else f"{one.compute:.0%}",
    "MEMORY": lambda one: "-" if one.memory is None else f"{one.memory:.0%}",
    "SENT": lambda one: str(one.inflight_requests),
    "RUNNING": lambda one: str(one.num_running),
    "WAITING": lambda one: str(one.num_waiting),
    "STEP": lambda one: (
        f"{1e3 * one.step_s:.0f} ms, {one.step_tokens:.0f} tokens" if one.step_s else "-"
    ),
    "BLOCKS": lambda one: _blocks(one),
    "REPORT": lambda one: "-" if one.age_s is None else f"{one.age_s:.1f} s",
    "PLACEMENT": lambda one: _placement(one),
}
_YELLOW = ("draining", "drained", "restarting", "going back", "aborted", "timed out", "leaving")
STYLES = {
    **dict.fromkeys(("ready", "done"), "green"),
    **dict.fromkeys(("down", "away", "failed"), "red"),
    **dict.fromkeys(_YELLOW, "yellow"),
    **dict.fromkeys(("running", "starting", "joining"), "cyan"),
    **dict.fromkeys(_COLUMNS, "bold"),
}


def status(
    asked: JsonOptions,
    watch: bool = option("go on until Ctrl-C", False),
    every_s: float = option(
        "time between two looks of --watch",
        1.0,
        rule=Rule(lambda value: value >= 0.1, "must be at least 0.1"),
    ),
) -> None:
    """Show a running server on one screen."""
    client = asked.client()
    if not watch or asked.as_json or not sys.stdout.isatty():
        while True:
            _print(client.status(), asked.as_json)
            if not watch:
                return
            sys.stdout.flush()
            time.sleep(every_s)
    from rich.live import Live

    with Live(_screen(client.status()), screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(every_s)
            live.update(_screen(client.status()), refresh=True)


def _print(found: ServerStatus, as_json: bool) -> None:
    if as_json:
        print_json(found, None)
        return
    lines, tables = _parts(found)
    print("\n".join(lines))
    for rows in tables:
        print_rows(rows, STYLES)


def _screen(found: ServerStatus) -> Group:
    from rich.console import Group
    from rich.text import Text

    lines, tables = _parts(found)
    return Group(*map(Text, lines), Text(), *(make_table(rows, STYLES) for rows in tables))


def _parts(found: ServerStatus) -> tuple[list[str], list[list[tuple[str, ...]]]]:
    """Return the lines, and the tables below them, that are not empty."""
    package = f" of {found.routing_package}" if found.routing_package else ""
    routing = f"routing {found.routing_policy}{package}"
    lines = [controller_line(found.controller), routing, found.back_pressure]
    nodes = node_rows(found.nodes) if found.nodes else []
    tables = [instance_rows(found), nodes, move_rows(found.moves)]
    return [printable(one) for one in lines if one], [one for one in tables if one]


def controller_line(found: ControllerStatus) -> str:
    """Return the orchestrator's state in one line."""
    if found.mode == "off":
        return "orchestrator off"
    line = f"orchestrator {found.mode}, {found.state.value}: {found.policy}"
    line += f" every {found.interval_s:g} s"
    if found.num_decisions:
        line += f", gap {found.gap:.2f}: {found.reason}"
    if found.error:
        line += f"; failed {found.num_restarts} times, last: {found.error}"
    return line


def instance_rows(found: ServerStatus) -> list[tuple[str, ...]]:
    """Return a heading, and a row for each instance."""
    return with_nodes(rows_of(_COLUMNS, found.instances), [one.node for one in found.instances])


def move_rows(moves: list[MoveLine]) -> list[tuple[str, ...]]:
    """Return a row for each move: moves under way, then the last ended ones."""
    return [
        (
            move.id,
            move.state,
            f"{move.seconds:.1f} s",
            ": ".join(filter(None, (move.what, move.error))),
        )
        for move in moves
    ]


def _blocks(one: InstanceStatus) -> str:
    gained = f" ({one.kv_blocks_gained:+d})" if one.kv_blocks_gained else ""
    return f"{one.kv_blocks or '-'}{gained}"


def _placement(one: InstanceStatus) -> str:
    parts = list(one.away)
    if one.guests:
        parts.append(f"holds {', '.join(one.guests)} ({format_size(one.guest_bytes)})")
    if one.left_out:
        parts.append(f"left out: {one.left_out}")
    return "; ".join(parts) or "at home"


app = App(status)
