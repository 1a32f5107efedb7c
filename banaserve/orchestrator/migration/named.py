"""Migration policy under the name that it is registered by, so that its mistakes name it."""

from __future__ import annotations

from dataclasses import dataclass

from banaserve.errors import PolicyError, UserError
from banaserve.orchestrator.migration.interface import MigrationPlan, MigrationPolicy
from banaserve.registry import one_line
from banaserve.types import ClusterView


@dataclass(frozen=True, slots=True)
class NamedMigrationPolicy:
    """A migration policy that answers with a plan, or says why not.

    Attributes:
        label: Its name in the registry, with the package of one that is not banaserve's own.
    """

    policy: MigrationPolicy
    label: str

    def plan(self, cluster: ClusterView) -> MigrationPlan:
        """Returns the plan of the policy.

        Raises:
            PolicyError: The policy fails, or its answer is no plan.
        """
        try:
            plan = self.policy.plan(cluster)
        except UserError:
            raise
        # It may be another package's code: sys.exit in it would end the server.
        except (Exception, SystemExit) as error:
            raise PolicyError(f"migration policy {self.label}: {one_line(error)}") from error
        if not isinstance(plan, MigrationPlan):
            what = type(plan).__name__
            raise PolicyError(f"migration policy {self.label}: plan returned a {what}")
        return plan
