"""Sub-commands by name: those of banaserve, and those that other installed packages offer.

A package offers a command by an entry point; its own summary is the command's::

    [project]
    description = "Balance requests over replicas."

    [project.entry-points."banaserve.commands"]
    route = "banaserve_route.command:route_command"
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

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

    def load(self) -> Any:
        """Import the command's module; return what ``attribute`` names."""
        return getattr(import_module(self.module), self.attribute)


COMMANDS = {
    name: Command(f"banaserve.cli.{module}", attribute, summary)
    for name, module, attribute, summary in (
        ("serve", "serve.command", "serve_command", "Serve a model over the OpenAI API."),
        ("chat", "admin.chat", "app", "Talk to the model of a running server."),
        ("node", "node", "app", "Run engines of a server on another machine."),
        ("doctor", "doctor.command", "app", "Say what this machine can run."),
        ("kvstore", "kvstore", "app", "Run the KV cache store, or look at one."),
        ("migrate", "admin.migrate", "app", "Move layers and heads between running instances."),
        (
            "placement",
            "admin.views.placement",
            "app",
            "Say which instance runs which layers and heads.",
        ),
        ("simulate", "simulate", "app", "Compare systems under a load in virtual time."),
        ("status", "admin.views.status", "app", "Show a running server on one screen."),
        (
            "decisions",
            "admin.views.decisions",
            "app",
            "Say what the orchestrator decided, and why.",
        ),
        (
            "trace",
            "admin.views.trace",
            "app",
            "Show one request's path, or list the last requests.",
        ),
        ("role", "admin.instances", "role_app", "Give a running instance another role."),
        ("drain", "admin.instances", "drain_app", "Let an instance's streams go on elsewhere."),
        ("restart", "admin.restart", "app", "Replace a server's engines one after the other."),
        (
            "scale",
            "admin.instances",
            "scale_app",
            "Add instances to a running server, or remove some.",
        ),
        ("nodes", "admin.nodes", "app", "Show a server's nodes, add one, or remove one."),
        ("orchestrator", "admin.orchestrator", "app", "Pause the orchestrator, or let it go on."),
        ("ui", "admin.ui", "app", "Show a server's page, or replay a decision log."),
        (
            "completion",
            "terminal.completion",
            "completion_command",
            "Print a shell's completion script.",
        ),
        ("version", "version", "version_command", "Show versions."),
    )
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
