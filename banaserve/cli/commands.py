"""Sub-commands by name: those of banaserve, and those that other installed packages offer.

A package offers a command by an entry point; its own summary is the command's::

    [project]
    description = "Tidy up."

    [project.entry-points."banaserve.commands"]
    tidy = "acme:run"
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import Distribution
from typing import Any, NamedTuple

from banaserve.base.plugins.discovery import entries_of

GROUP = "banaserve.commands"


class OfferedCommand(NamedTuple):
    """Command of a package of this repository that may not be installed."""

    package: str
    summary: str


OFFERED_BY = {
    "bench": OfferedCommand("banaserve-bench", "Load a server, compare systems, report results."),
    "plan": OfferedCommand(
        "banaserve-bench", "Say whether to split prefill and decode for a load."
    ),
    "route": OfferedCommand("banaserve-route", "Balance requests over replicas."),
    "simulate": OfferedCommand("banaserve-bench", "Compare systems under a load in virtual time."),
}


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


def _own(where: str, summary: str) -> Command:
    """Return a command of this package; ``where`` is its module and attribute."""
    module, _, attribute = where.partition(":")
    return Command(f"banaserve.cli.{module}", attribute, summary)


COMMANDS = {
    "serve": _own("serve.command:serve_command", "Serve a model over the OpenAI API."),
    "chat": _own("admin.chat:app", "Talk to the model of a running server."),
    "node": _own("node:app", "Run engines of a server on another machine."),
    "doctor": _own("doctor.command:app", "Say what this machine can run."),
    "kvstore": _own("kvstore:app", "Run the KV cache store, or look at one."),
    "migrate": _own("admin.migrate:app", "Move layers and heads between running instances."),
    "placement": _own("admin.placement:app", "Say which instance runs which layers and heads."),
    "status": _own("admin.status:app", "Show a running server on one screen."),
    "decisions": _own("admin.decisions:app", "Say what the orchestrator decided, and why."),
    "trace": _own("admin.trace:app", "Show one request's path, or list the last requests."),
    "role": _own("admin.operations:role_app", "Give a running instance another role."),
    "drain": _own("admin.operations:drain_app", "Let an instance's streams go on elsewhere."),
    "restart": _own(
        "admin.operations:restart_app", "Replace a server's engines one after the other."
    ),
    "scale": _own(
        "admin.operations:scale_app", "Add instances to a running server, or remove some."
    ),
    "nodes": _own("admin.operations:nodes_app", "Show a server's nodes, add one, or remove one."),
    "orchestrator": _own(
        "admin.operations:orchestrator_app", "Pause the orchestrator, or let it go on."
    ),
    "ui": _own("admin.ui:app", "Show a server's page, or replay a decision log."),
    "completion": _own(
        "terminal.completion:completion_command", "Print a shell's completion script."
    ),
    "version": _own("main:version_app", "Show versions."),
}


def known() -> dict[str, Command]:
    """Return all commands: banaserve's own first, which others cannot replace."""
    others = offered()
    return COMMANDS | {name: others[name] for name in others if name not in COMMANDS}


def offered() -> dict[str, Command]:
    """Return the commands of other installed packages, none of which is imported."""
    entries, _ = entries_of(GROUP)
    return {
        entry.name: Command(entry.module, entry.attr, _summary(entry.name, entry.dist))
        for _, entry in reversed(entries)  # the first package of a name hides others
        if entry.dist is not None
    }


def _summary(name: str, package: Distribution) -> str:
    own = OFFERED_BY.get(name)
    if own and own.package == package.metadata["Name"]:
        return own.summary
    return package.metadata["Summary"] or ""
