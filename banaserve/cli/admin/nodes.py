"""``banaserve nodes``: show the nodes of a running server, add one, or drain and remove one."""

from __future__ import annotations

from dataclasses import dataclass

from banaserve.base.arguments import argument, extra, option
from banaserve.cli.admin.following import ended, followed
from banaserve.cli.admin.options import JsonOptions
from banaserve.cli.admin.views.node_tables import node_rows
from banaserve.cli.admin.views.status import STYLES
from banaserve.cli.app import App
from banaserve.cli.terminal.console import print_json, print_rows
from banaserve.contracts.control_api import NodeRequest
from banaserve.contracts.instances import NodeChange


@dataclass(frozen=True, kw_only=True)
class NodeAddOptions(JsonOptions):
    """Options of ``banaserve nodes add``."""

    address: str = argument("HOST:PORT of `banaserve node`, as --node has it", metavar="ADDRESS")
    waits: bool = option(
        "return at its end, or at once (--wait)",
        True,
        name="--wait",
    )


@dataclass(frozen=True, kw_only=True)
class NodeRemoveOptions(NodeAddOptions):
    """Options of ``banaserve nodes remove``."""

    keep: bool = option(
        "do with fewer instances, instead of starting as many on other nodes first",
        True,
        name="--shrink",
        action="store_false",
        also=(extra("--keep", "the opposite, and the default", True, action="store_true"),),
    )
    timeout_s: float = option("time to wait for the last request of an instance", 300.0)


def list_nodes(asked: JsonOptions) -> None:
    """Show the nodes, their instances, and how many more they have room for."""
    found = asked.client().nodes()
    if asked.as_json:
        print_json(found)
    elif found:
        print_rows(node_rows(found), STYLES)
    else:
        print("the engines of this server run on its own machine")


def add(asked: NodeAddOptions) -> int:
    """Add a node; `banaserve scale` and the policy may then use it.

    With --cluster, ADDRESS is that of a Ray node; nodes that join Ray are added automatically.
    """
    return _change(asked, NodeRequest("add", asked.address))


def remove(asked: NodeRemoveOptions) -> int:
    """Drain a node and give it back; no request is lost."""
    return _change(asked, NodeRequest("remove", asked.address, asked.timeout_s, asked.keep))


def _change(asked: NodeAddOptions, ask: NodeRequest) -> int:
    changes = asked.client().node_changes
    change = changes.begin(ask)
    if asked.waits:
        change = followed(changes, change, _progress, is_silent=asked.as_json)
    done = "has joined" if change.action == "add" else "has left"
    words = f"node {change.node} {done} after {change.seconds:.1f} s"
    return ended(change, asked.as_json, [words], change.reason or f"{change.id} was given up")


def _progress(change: NodeChange) -> str:
    return f"{change.now or change.state}, {change.seconds:.0f} s" if change.is_open else ""


app = App(
    None,
    "Show the nodes of a running server, add one, or drain and remove one.",
    list=list_nodes,
    add=add,
    remove=remove,
)
