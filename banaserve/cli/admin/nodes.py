"""``banaserve nodes``: show the nodes of a running server, add one, or drain and remove one."""

from __future__ import annotations

from banaserve.base.arguments import argument, extra, option
from banaserve.cli.admin.operation_progress import follow
from banaserve.cli.admin.options import JsonOptions
from banaserve.cli.admin.views.node_tables import node_rows
from banaserve.cli.admin.views.status import STYLES
from banaserve.cli.app import App
from banaserve.cli.terminal.console import print_json, print_rows
from banaserve.contracts.control_api import NodeRequest

_ADDRESS = "HOST:PORT of `banaserve node`, as --node has it"
_WAIT = "return at its end, or at once (--wait)"


def list_nodes(asked: JsonOptions) -> None:
    """Show the nodes, their instances, and how many more they have room for."""
    found = asked.client().nodes()
    if asked.as_json:
        print_json(found)
    elif found:
        print_rows(node_rows(found), STYLES)
    else:
        print("the engines of this server run on its own machine")


def add(
    asked: JsonOptions,
    address: str = argument(_ADDRESS, metavar="ADDRESS"),
    waits: bool = option(_WAIT, True, name="--wait"),
) -> int:
    """Add a node; `banaserve scale` and the policy may then use it.

    With --cluster, ADDRESS is that of a Ray node; nodes that join Ray are added automatically.
    """
    return _change(asked, NodeRequest("add", address), waits)


def remove(
    asked: JsonOptions,
    address: str = argument(_ADDRESS, metavar="ADDRESS"),
    waits: bool = option(_WAIT, True, name="--wait"),
    keep: bool = option(
        "do with fewer instances, instead of starting as many on other nodes first",
        True,
        name="--shrink",
        action="store_false",
        also=(extra("--keep", "the opposite, and the default", True, action="store_true"),),
    ),
    timeout_s: float = option("time to wait for the last request of an instance", 300.0),
) -> int:
    """Drain a node and give it back; no request is lost."""
    return _change(asked, NodeRequest("remove", address, timeout_s, keep), waits)


def _change(asked: JsonOptions, ask: NodeRequest, waits: bool) -> int:
    changes = asked.client().node_changes
    done = "has joined" if ask.action == "add" else "has left"
    return follow(
        asked,
        changes,
        changes.begin(ask),
        progress=lambda one: f"{one.now or one.state}, {one.seconds:.0f} s" if one.is_open else "",
        done=lambda one: f"node {one.node} {done} after {one.seconds:.1f} s",
        failure=lambda one: one.reason or f"{one.id} was given up",
        waits=waits,
    )


app = App(
    None,
    "Show the nodes of a running server, add one, or drain and remove one.",
    list=list_nodes,
    add=add,
    remove=remove,
)
