"""Migration policy with its registered name, so that messages about its errors name it."""

from __future__ import annotations

from dataclasses import dataclass

from banaserve.base.errors import PolicyError, UserError, one_line
from banaserve.base.types import ClusterView
from banaserve.orchestrator.control.move_policies.interface import MigrationPlan, MigrationPolicy


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
