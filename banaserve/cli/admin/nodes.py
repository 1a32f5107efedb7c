"""``banaserve nodes``: show the nodes of a running server, add one, or drain and remove one."""

from __future__ import annotations

import json
from typing import Annotated

import msgspec
import typer

from banaserve.cli.admin.following import followed
from banaserve.cli.admin.node_tables import node_rows
from banaserve.cli.admin.options import JsonOption, ServerOptions, with_server_options
from banaserve.cli.admin.status import STYLES
from banaserve.cli.console import print_error, print_rows
from banaserve.controller.schemas import NodeRequest
from banaserve.engine.interface import NodeChange

app = typer.Typer(name="nodes", add_completion=False)
_EXIT_FAILED = 2

Node = Annotated[
    str, typer.Argument(metavar="ADDRESS", help="HOST:PORT of `banaserve node`, as --node has it.")
]
Waits = Annotated[bool, typer.Option("--wait/--no-wait", help="Return at its end, or at once.")]


@app.command("list")
@with_server_options
def list_nodes(server: ServerOptions, as_json: JsonOption = False) -> None:
    """Show the nodes, their instances, and how many more they have room for."""
    found = server.client().nodes()
    if as_json:
        typer.echo(json.dumps(msgspec.to_builtins(found), indent=2))
    elif found:
        print_rows(node_rows(found), STYLES)
    else:
        typer.echo("the engines of this server run on its own machine")


@app.command("add")
@with_server_options
def add(
    server: ServerOptions, address: Node, waits: Waits = True, as_json: JsonOption = False
) -> None:
    """Add a node; `banaserve scale` and the policy may then use it.

    With --cluster, ADDRESS is that of a Ray node; nodes that join Ray are added automatically.
    """
    _change(server, NodeRequest("add", address), waits, as_json)


@app.command("remove")
@with_server_options
def remove(
    server: ServerOptions,
    address: Node,
    keep: Annotated[
        bool,
        typer.Option(
            "--keep/--shrink",
            help="Start as many instances on other nodes first, or do with fewer.",
        ),
    ] = True,
    timeout_s: Annotated[
        float,
        typer.Option("--timeout", help="How long to wait for the last request of an instance."),
    ] = 300.0,
    waits: Waits = True,
    as_json: JsonOption = False,
) -> None:
    """Drain a node and give it back; no request is lost."""
    _change(server, NodeRequest("remove", address, timeout_s, keep), waits, as_json)


def _change(server: ServerOptions, ask: NodeRequest, waits: bool, as_json: bool) -> None:
    client = server.client()
    change = client.node_changes.begin(ask)
    if waits:
        change = followed(client.node_changes, change, _progress, is_silent=as_json)
    if as_json:
        typer.echo(json.dumps(msgspec.to_builtins(change), indent=2))
    elif change.state == "done":
        done = "has joined" if change.action == "add" else "has left"
        typer.echo(f"node {change.node} {done} after {change.seconds:.1f} s")
    elif change.is_open:
        typer.echo(f"{change.id}: {change.state}; `banaserve status` shows how far it is")
    if not change.is_open and change.state != "done":
        print_error(change.reason or f"{change.id} was given up")
        raise typer.Exit(_EXIT_FAILED)


def _progress(change: NodeChange) -> str:
    return f"{change.now or change.state}, {change.seconds:.0f} s" if change.is_open else ""
