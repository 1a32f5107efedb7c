"""No migration: the static baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from banaserve.base.types import ClusterView
from banaserve.orchestrator.control.move_policies.interface import MigrationPlan


@dataclass(frozen=True, slots=True)
class StillOptions:
    """Options of ``still``: none."""


class Still:
    """Policy that moves nothing."""

    Options: ClassVar = StillOptions

    def __init__(self, options: StillOptions) -> None:
        pass

    def plan(self, cluster: ClusterView) -> MigrationPlan:
        return MigrationPlan(reason="the policy moves nothing")
