"""Loader of entry points: implementations of banaserve's interfaces from other packages.

A package offers a class under one of the groups of ``PluginGroup`` in its ``pyproject.toml``::

    [project.entry-points."banaserve.routing_policies"]
    least_slack = "acme_routing:LeastSlack"

Each interface states the requirements on its implementations; docs/guides has examples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import Distribution, EntryPoint, distributions
from typing import Any

from banaserve.base.registry import Registry, one_line


class PluginGroup(StrEnum):
    """Groups of entry points that are read; the docstring of each names its interface."""

    ROUTING_POLICIES = "banaserve.routing_policies"
    """``banaserve.orchestrator.control.routing.interface.RoutingPolicy``."""
    REPLICA_POLICIES = "banaserve.replica_policies"
    """``banaserve.route.policies.policy.Policy``."""
    MIGRATION_POLICIES = "banaserve.migration_policies"
    """``banaserve.orchestrator.control.migration.interface.MigrationPolicy``."""
    STORE_TIERS = "banaserve.store_tiers"
    """``banaserve.kvstore.tiers.interface.StoreTier``, opened by URL."""


@dataclass(frozen=True, slots=True)
class Plugin:
    """An entry point that was found.

    Attributes:
        name: Name by which options select the plugin.
        package: Name and version of the package that offers it.
        problem: Reason for its refusal, in one line; empty if it was registered.
    """

    group: str
    name: str
    package: str
    problem: str = ""

    def __str__(self) -> str:
        """Return one human-readable line."""
        said = f"plugin {self.name} of {self.package} ({self.group})"
        return f"{said} is refused: {self.problem}" if self.problem else said


def load_plugins(registries: Mapping[PluginGroup, Registry[Any]]) -> list[Plugin]:
    """Import every entry point of these groups and register the object that it refers to.

    A plugin that cannot be used does not stop the others: it is refused, and its registry gives the
    reason when the plugin is requested. Idempotent.

    Returns:
        Plugins found, sorted by group, name and package; show those with a ``problem``.
    """
    entries: list[tuple[PluginGroup, str, str, EntryPoint]] = []
    unread: list[Plugin] = []
    for package, distribution in _packages().items():
        try:
            found = distribution.entry_points
        except Exception as error:  # a line without "=" is a TypeError
            unread.append(Plugin("banaserve.*", "entry_points.txt", package, one_line(error)))
            continue
        entries += [
            (group, entry.name, package, entry)
            for group in registries
            for entry in found.select(group=group)
        ]
    entries.sort(key=lambda entry: entry[:3])
    return unread + [
        _load(entry, package, group, registries[group]) for group, _, package, entry in entries
    ]


def _packages() -> dict[str, Distribution]:
    """Return the installed packages with banaserve entry points, by name and version."""
    found: dict[str, tuple[str, Distribution]] = {}
    for distribution in distributions():
        if "banaserve." in (distribution.read_text("entry_points.txt") or ""):
            # As for imports, the first package on the path hides others with the same name.
            name = distribution.metadata["Name"] or "a package without a name"
            version = distribution.metadata["Version"] or "without a version"
            found.setdefault(name.lower(), (f"{name} {version}", distribution))
    return dict(found.values())


def _load(entry: EntryPoint, package: str, group: PluginGroup, registry: Registry[Any]) -> Plugin:
    try:
        registry.add_plugin(entry.name, entry.load(), package)
    # Code of another package runs here: it may raise any exception or call sys.exit.
    except (Exception, SystemExit) as error:
        problem = one_line(error)
        registry.refuse(entry.name, package, problem)
        return Plugin(group, entry.name, package, problem)
    return Plugin(group, entry.name, package)
