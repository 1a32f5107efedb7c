"""No migration: the static baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from banaserve.base.types import ClusterView
from banaserve.orchestrator.control.move_policies.interface import MigrationPlan


@dataclass(frozen=True, slots=True)
class NoMovesOptions:
    """Options of ``still``: none."""


class NoMoves:
    """Policy that moves nothing."""

    Options: ClassVar = NoMovesOptions

    def __init__(self, options: NoMovesOptions) -> None:
        pass

    def plan(self, cluster: ClusterView) -> MigrationPlan:
        return MigrationPlan(reason="the policy moves nothing")
