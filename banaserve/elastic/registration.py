"""Registration of ``elastic`` as a migration policy; imported at the first lookup of one."""

from __future__ import annotations

from banaserve.elastic.policy import Elastic
from banaserve.orchestrator.migration.registry import POLICIES

POLICIES.add("elastic", Elastic)
