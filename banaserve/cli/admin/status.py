"""``banaserve status``: instances, loads, placements, moves and the orchestrator on one screen."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from banaserve.base.arguments import Rule, option
from banaserve.cli.admin.node_tables import node_rows, with_nodes
from banaserve.cli.admin.options import JsonOptions
from banaserve.cli.app import App
from banaserve.cli.console import make_table, print_json, print_rows
from banaserve.contracts.control_api import ControllerStatus, InstanceStatus, MoveLine, ServerStatus
from banaserve.kvstore.sizes import format_size

if TYPE_CHECKING:
    from rich.console import Group

_HEADING = (
    "INSTANCE",
    "ROLE",
    "STATE",
    "COMPUTE",
    "MEMORY",
    "SENT",
    "RUNNING",
    "WAITING",
    "STEP",
    "BLOCKS",
    "REPORT",
    "PLACEMENT",
)
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
    **dict.fromkeys(_HEADING, "bold"),
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
    rows = [_HEADING, *(_row(instance) for instance in found.instances)]
    return with_nodes(rows, [one.node for one in found.instances])


def move_rows(moves: list[MoveLine]) -> list[tuple[str, ...]]:
    """Return a row for each move: moves under way, then the last ended ones."""
    return [
        (move.id, move.state, f"{move.seconds:.1f} s", f"{move.what} {move.error}".strip())
        for move in moves
    ]


def _row(one: InstanceStatus) -> tuple[str, ...]:
    blocks = str(one.kv_blocks) if one.kv_blocks else "-"
    if one.kv_blocks_gained:
        blocks += f" ({one.kv_blocks_gained:+d})"
    return (
        one.id,
        one.role,
        one.state,
        _share(one.compute),
        _share(one.memory),
        str(one.inflight_requests),
        str(one.num_running),
        str(one.num_waiting),
        f"{1e3 * one.step_s:.0f} ms, {one.step_tokens:.0f} tokens" if one.step_s else "-",
        blocks,
        "-" if one.age_s is None else f"{one.age_s:.1f} s",
        _placement(one),
    )


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _placement(one: InstanceStatus) -> str:
    parts = list(one.away)
    if one.guests:
        parts.append(f"holds {', '.join(one.guests)} ({format_size(one.guest_bytes)})")
    if one.left_out:
        parts.append(f"left out: {one.left_out}")
    return "; ".join(parts) or "at home"


app = App(status)
