"""Registration of ``elastic`` as a migration policy; imported at the first lookup of one."""

from __future__ import annotations

from banaserve.orchestrator.control.move_policies.registry import POLICIES
from banaserve.orchestrator.planner.policy import Elastic

POLICIES.add("elastic", Elastic)
