"""Sub-commands by name: those of banaserve, and those that other installed packages offer.

A package offers a command by an entry point; its own summary is the command's::

    [project]
    description = "Balance requests over replicas."

    [project.entry-points."banaserve.commands"]
    route = "banaserve_route.command:route_command"
"""

from __future__ import annotations

from typing import NamedTuple

from banaserve.base.plugins import entries_of

GROUP = "banaserve.commands"
OFFERED_BY = {"bench": "banaserve-bench", "route": "banaserve-route"}
"""Packages to install for commands that banaserve lacks without them."""


class Command(NamedTuple):
    """Sub-command, whose module is imported only when it runs, to save imports.

    Attributes:
        attribute: Name of an ``App``, or of a function that takes the remaining arguments
            unchanged and returns an exit code.
    """

    module: str
    attribute: str
    summary: str


COMMANDS = {
    "serve": Command(
        "banaserve.cli.serve.command", "serve_command", "Serve a model over the OpenAI API."
    ),
    "chat": Command("banaserve.cli.admin.chat", "app", "Talk to the model of a running server."),
    "node": Command("banaserve.cli.node", "app", "Run engines of a server on another machine."),
    "doctor": Command("banaserve.cli.doctor.command", "app", "Say what this machine can run."),
    "kvstore": Command("banaserve.cli.kvstore", "app", "Run the KV cache store, or look at one."),
    "migrate": Command(
        "banaserve.cli.admin.migrate", "app", "Move layers and heads between running instances."
    ),
    "placement": Command(
        "banaserve.cli.admin.views.placement",
        "app",
        "Say which instance runs which layers and heads.",
    ),
    "simulate": Command(
        "banaserve.cli.simulate", "app", "Compare systems under a load in virtual time."
    ),
    "status": Command(
        "banaserve.cli.admin.views.status", "app", "Show a running server on one screen."
    ),
    "decisions": Command(
        "banaserve.cli.admin.views.decisions", "app", "Say what the orchestrator decided, and why."
    ),
    "trace": Command(
        "banaserve.cli.admin.views.trace",
        "app",
        "Show one request's path, or list the last requests.",
    ),
    "role": Command("banaserve.cli.admin.role", "app", "Give a running instance another role."),
    "drain": Command(
        "banaserve.cli.admin.drain", "app", "Let an instance's streams go on elsewhere."
    ),
    "restart": Command(
        "banaserve.cli.admin.restart", "app", "Replace a server's engines one after the other."
    ),
    "scale": Command(
        "banaserve.cli.admin.scale", "app", "Add instances to a running server, or remove some."
    ),
    "nodes": Command(
        "banaserve.cli.admin.nodes", "app", "Show a server's nodes, add one, or remove one."
    ),
    "orchestrator": Command(
        "banaserve.cli.admin.orchestrator", "app", "Pause the orchestrator, or let it go on."
    ),
    "ui": Command(
        "banaserve.cli.admin.ui", "app", "Show a server's page, or replay a decision log."
    ),
    "completion": Command(
        "banaserve.cli.terminal.completion",
        "completion_command",
        "Print a shell's completion script.",
    ),
    "version": Command("banaserve.cli.version", "version_command", "Show versions."),
}


def known() -> dict[str, Command]:
    """Return all commands: banaserve's own first, which others cannot replace."""
    others = offered()
    return COMMANDS | {name: others[name] for name in others if name not in COMMANDS}


def offered() -> dict[str, Command]:
    """Return the commands of other installed packages, none of which is imported."""
    entries, _ = entries_of(GROUP)
    return {
        entry.name: Command(entry.module, entry.attr, entry.dist.metadata["Summary"] or "")
        for _, entry in reversed(entries)  # the first package of a name hides others
        if entry.dist is not None
    }
