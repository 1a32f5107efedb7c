"""Registration of ``elastic`` among the migration policies, when they are first asked for."""

from __future__ import annotations

from banaserve.elastic.policy import Elastic
from banaserve.orchestrator.migration.registry import POLICIES

POLICIES.add("elastic", Elastic)
