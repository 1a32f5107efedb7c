"""Registry of migration policies."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Protocol

from banaserve.orchestrator.migration.interface import MigrationPolicy
from banaserve.orchestrator.migration.no_op import Still
from banaserve.orchestrator.migration.published import Published
from banaserve.orchestrator.migration.repaired import Repaired
from banaserve.registry import Registry, build_options, check_class, check_options, option_names


class MigrationPolicyClass(Protocol):
    """A policy's class: its options' dataclass and how it is built from them."""

    Options: type[Any]

    def __call__(self, options: Any) -> MigrationPolicy: ...


def _check(name: str, found: object) -> MigrationPolicyClass:
    policy = check_class(found, MigrationPolicy, ("options",))
    check_options(policy)
    return policy


POLICIES: Registry[MigrationPolicyClass] = Registry(
    "migration policy", _check, ["banaserve.elastic.registration"]
)
POLICIES.add("published", Published)
POLICIES.add("repaired", Repaired)
POLICIES.add("still", Still)

names = POLICIES.names


def defaults(name: str) -> dict[str, Any]:
    """Returns the options of the policy ``name`` with their defaults.

    Raises:
        UserError: An unknown policy.
    """
    options = POLICIES.get(name).Options()
    return {field.name: getattr(options, field.name) for field in fields(options)}


def make(name: str, /, **section: Any) -> MigrationPolicy:
    """Builds the policy ``name`` from its section of the configuration.

    Raises:
        UserError: An unknown policy, an unknown option or a value out of range.
    """
    policy = POLICIES.get(name)
    known = option_names(policy.Options)
    return policy(build_options(f"migration policy {name}", known, policy.Options, section))
