"""Registry of migration policies."""

from __future__ import annotations

from typing import Any, Protocol

from banaserve.base.implementation_checks import check_class, check_options
from banaserve.base.policy_options import build_options, build_policy
from banaserve.base.registry import Registry
from banaserve.orchestrator.control.move_policies.algorithm1_published import Published
from banaserve.orchestrator.control.move_policies.algorithm1_repaired import Repaired
from banaserve.orchestrator.control.move_policies.interface import MigrationPolicy
from banaserve.orchestrator.control.move_policies.named import NamedMigrationPolicy
from banaserve.orchestrator.control.move_policies.still import Still


class MigrationPolicyClass(Protocol):
    """Class of a policy: the dataclass of its options, and its constructor."""

    Options: type[Any]

    def __call__(self, options: Any) -> MigrationPolicy: ...


def _check(name: str, found: object) -> MigrationPolicyClass:
    policy = check_class(found, MigrationPolicy, ("options",))
    check_options(policy)
    return policy


POLICIES: Registry[MigrationPolicyClass] = Registry(
    "migration policy", _check, ["banaserve.orchestrator.planner.registration"]
)
POLICIES.add("published", Published)
POLICIES.add("repaired", Repaired)
POLICIES.add("still", Still)

names = POLICIES.names


def make(name: str, /, **section: Any) -> MigrationPolicy:
    """Build the policy ``name`` from its section of the configuration.

    Raises:
        UserError: The policy or an option is unknown, or a value is out of range.
    """
    policy, package, owner = POLICIES.get(name), POLICIES.owner(name), f"migration policy {name}"
    options = build_options(owner, policy.Options, policy.Options, section, package)
    return build_policy(owner, package, policy, options)


def make_named(name: str, /, **section: Any) -> NamedMigrationPolicy:
    """Build the policy ``name`` as ``make`` does; messages about its errors name it.

    Raises:
        UserError: The policy or an option is unknown, or a value is out of range.
    """
    return NamedMigrationPolicy(make(name, **section), POLICIES.label(name))
