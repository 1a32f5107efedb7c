"""Registry of migration policies, and a policy with its name for messages about its errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from banaserve.base.errors import PolicyError, UserError, one_line
from banaserve.base.plugins.implementation_checks import check_class, check_options
from banaserve.base.plugins.policy_options import build_options, build_policy
from banaserve.base.plugins.registry import Registry
from banaserve.base.types import ClusterView
from banaserve.orchestrator.control.move_policies.algorithm1 import Published, Repaired
from banaserve.orchestrator.control.move_policies.interface import MigrationPlan, MigrationPolicy
from banaserve.orchestrator.control.move_policies.no_moves import NoMoves


@dataclass(frozen=True, slots=True)
class NamedMigrationPolicy:
    """A migration policy whose answers are checked: a plan, or an error.

    Attributes:
        label: Name of the policy in the registry, with its package if that is not banaserve.
    """

    policy: MigrationPolicy
    label: str

    def plan(self, cluster: ClusterView) -> MigrationPlan:
        """Return the plan of the policy.

        Raises:
            UserError: The policy has raised it.
            PolicyError: The policy has raised another exception, or its answer is not a plan.
        """
        try:
            plan = self.policy.plan(cluster)
        except UserError:
            raise
        # The code may be another package's: sys.exit in it would end the server.
        except (Exception, SystemExit) as error:
            raise PolicyError(f"migration policy {self.label}: {one_line(error)}") from error
        if not isinstance(plan, MigrationPlan):
            what = type(plan).__name__
            raise PolicyError(f"migration policy {self.label}: plan returned a {what}")
        return plan


class MigrationPolicyClass(Protocol):
    """Class of a policy: the dataclass of its options, and its constructor."""

    Options: type[Any]

    def __call__(self, options: Any) -> MigrationPolicy: ...


def _check(name: str, found: object) -> MigrationPolicyClass:
    policy = check_class(found, MigrationPolicy, ("options",))
    check_options(policy)
    return policy


POLICIES: Registry[MigrationPolicyClass] = Registry(
    "migration policy", _check, ["banaserve.orchestrator.planner.policy"]
)
POLICIES.add("published", Published)
POLICIES.add("repaired", Repaired)
POLICIES.add("still", NoMoves)

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
