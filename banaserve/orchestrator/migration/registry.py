"""Migration policies by name."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from banaserve.names import check_known
from banaserve.orchestrator.migration.interface import MigrationPolicy
from banaserve.orchestrator.migration.no_op import Still, StillOptions
from banaserve.orchestrator.migration.options import PublishedOptions, RepairedOptions
from banaserve.orchestrator.migration.published import Published
from banaserve.orchestrator.migration.repaired import Repaired

_POLICIES: dict[str, tuple[type[Any], type[Any]]] = {
    "published": (Published, PublishedOptions),
    "repaired": (Repaired, RepairedOptions),
    "still": (Still, StillOptions),
}


def names() -> list[str]:
    """Returns every policy's name in alphabetical order."""
    return sorted(_POLICIES)


def defaults(name: str) -> dict[str, Any]:
    """Returns the options of the policy ``name`` with their defaults.

    Raises:
        UserError: An unknown policy.
    """
    check_known("migration policy", name, names())
    return {field.name: field.default for field in fields(_POLICIES[name][1])}


def make(name: str, /, **section: Any) -> MigrationPolicy:
    """Builds the policy ``name`` from its section of the configuration.

    Raises:
        UserError: An unknown policy, an unknown option or a value out of range.
    """
    check_known("migration policy", name, names())
    policy, options = _POLICIES[name]
    known = [field.name for field in fields(options)]
    for option in section:
        check_known(f"option of migration policy {name}", option, known)
    built: MigrationPolicy = policy(options(**section))
    return built
