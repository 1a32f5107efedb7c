"""``banaserve status``: instances, loads, placements, moves and the orchestrator on one screen."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from banaserve.base.arguments import Rule, option
from banaserve.cli.admin.options import JsonOptions
from banaserve.cli.admin.views.node_tables import node_rows, with_nodes
from banaserve.cli.app import App
from banaserve.cli.terminal.console import Columns, make_table, print_json, print_rows, rows_of
from banaserve.contracts.control_api import ControllerStatus, InstanceStatus, MoveLine, ServerStatus
from banaserve.kvstore.sizes import format_size

if TYPE_CHECKING:
    from rich.console import Group

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
STYLES = {
    "ready": "green",
    "down": "red",
    "away": "red",
    "draining": "yellow",
    "drained": "yellow",
    "restarting": "yellow",
    "going back": "yellow",
    "done": "green",
    "failed": "red",
    "aborted": "yellow",
    "timed out": "yellow",
    "running": "cyan",
    "starting": "cyan",
    "joining": "cyan",
    "leaving": "yellow",
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
    client, as_json = asked.client(), asked.as_json
    if not watch:
        _print(client.status(), as_json)
    elif as_json or not sys.stdout.isatty():
        while True:
            _print(client.status(), as_json)
            sys.stdout.flush()
            time.sleep(every_s)
    else:
        from rich.live import Live

        with Live(_screen(client.status()), screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(every_s)
                live.update(_screen(client.status()), refresh=True)


def _print(found: ServerStatus, as_json: bool) -> None:
    if as_json:
        print_json(found, None)
        return
    print(controller_line(found.controller))
    print(routing_line(found))
    if found.back_pressure:
        print(found.back_pressure)
    print_rows(instance_rows(found), STYLES)
    if found.nodes:
        print_rows(node_rows(found.nodes), STYLES)
    if found.moves:
        print_rows(move_rows(found.moves), STYLES)


def _screen(found: ServerStatus) -> Group:
    from rich.console import Group
    from rich.text import Text

    return Group(
        Text(controller_line(found.controller)),
        Text(routing_line(found)),
        Text(found.back_pressure),
        make_table(instance_rows(found), STYLES),
        Text(),
        make_table(node_rows(found.nodes) if found.nodes else [], STYLES),
        make_table(move_rows(found.moves), STYLES),
    )


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


def routing_line(found: ServerStatus) -> str:
    """Return the routing policy in one line."""
    package = f" of {found.routing_package}" if found.routing_package else ""
    return f"routing {found.routing_policy}{package}"


def instance_rows(found: ServerStatus) -> list[tuple[str, ...]]:
    """Return a heading, and a row for each instance."""
    return with_nodes(rows_of(_COLUMNS, found.instances), [one.node for one in found.instances])


def move_rows(moves: list[MoveLine]) -> list[tuple[str, ...]]:
    """Return a row for each move: moves under way, then the last ended ones."""
    return [
        (move.id, move.state, f"{move.seconds:.1f} s", f"{move.what} {move.error}".strip())
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
