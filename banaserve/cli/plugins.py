"""Plugins of installed packages, loaded for a command."""

from __future__ import annotations

from typing import Any

from banaserve.base.plugins.discovery import Plugin, PluginGroup, entries_of, load_plugins
from banaserve.base.plugins.registry import Registry
from banaserve.cli.terminal.console import print_error
from banaserve.kvstore.tiers.registry import TIERS
from banaserve.orchestrator.control.move_policies.registry import POLICIES as MIGRATION_POLICIES
from banaserve.orchestrator.control.routing.registry import POLICIES as ROUTING_POLICIES

REGISTRIES: dict[PluginGroup, Registry[Any]] = {
    PluginGroup.ROUTING_POLICIES: ROUTING_POLICIES,
    PluginGroup.MIGRATION_POLICIES: MIGRATION_POLICIES,
    PluginGroup.STORE_TIERS: TIERS,
}
OFFERED = "banaserve.registries"
"""Group of entry points by which a package offers the registry of a group that it reads."""


def registries(*groups: PluginGroup) -> dict[PluginGroup, Registry[Any]]:
    """Return the registries of ``groups``, without those whose packages are not installed."""
    if not REGISTRIES.keys() >= set(groups):
        entries, _ = entries_of(OFFERED)
        REGISTRIES.update({PluginGroup(entry.name): entry.load() for _, entry in entries})
    return {group: REGISTRIES[group] for group in groups if group in REGISTRIES}


def rivalries(*asked: tuple[PluginGroup, str]) -> list[str]:
    """Return a line for each name that several packages offer, on which package's is used."""
    lines = [REGISTRIES[group].rivalry(name) for group, name in asked]
    return [line for line in lines if line]


def warn_of_rivalries(*asked: tuple[PluginGroup, str]) -> None:
    """Print the lines of ``rivalries`` to standard error."""
    for line in rivalries(*asked):
        print_error(line)


def use_plugins(*groups: PluginGroup) -> list[Plugin]:
    """Register the plugins of ``groups``; print a line to standard error for each refused one."""
    found = load_plugins(registries(*groups))
    for plugin in found:
        if plugin.problem:
            print_error(str(plugin))
    return found
