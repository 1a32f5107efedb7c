"""Old import paths that guides named, kept for one release.

An import of an old path gives the module of the new path and says so in one line.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_CONTROL = "banaserve.orchestrator.control"
NEW_PATHS = {
    "banaserve.api.admin_client": "banaserve.frontdoor.admin_client",
    "banaserve.engine.vllm.kv_connector.connector": "banaserve.engine.connector.connector",
    "banaserve.engine.vllm.migration.api": "banaserve.contracts.migration_api",
    "banaserve.engine.vllm.preble_scheduler": "banaserve.engine.preble_scheduler",
    "banaserve.errors": "banaserve.base.errors",
    "banaserve.kvstore.interface": "banaserve.kvstore.leases",
    "banaserve.orchestrator.control.migration.interface": f"{_CONTROL}.move_policies.interface",
    "banaserve.orchestrator.control.model.handing_over": f"{_CONTROL}.model.moving",
    "banaserve.orchestrator.migration.interface": f"{_CONTROL}.move_policies.interface",
    "banaserve.orchestrator.replicas.interface": "banaserve_route.policies.interface",
    "banaserve.orchestrator.routing.interface": f"{_CONTROL}.routing.interface",
    "banaserve.orchestrator.routing.leg_by_leg": f"{_CONTROL}.routing.leg_by_leg",
    "banaserve.orchestrator.routing.legs": f"{_CONTROL}.routing.legs",
    "banaserve.orchestrator.routing.load": f"{_CONTROL}.routing.load",
    "banaserve.run_dir": "banaserve.base.platform.run_dir",
    "banaserve.types": "banaserve.base.types",
}
_FOLDERS = {name.rsplit(".", depth)[0] for name in NEW_PATHS for depth in range(1, name.count("."))}


class OldPaths(MetaPathFinder, Loader):
    """Finder of modules by their old paths, asked after all others."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a specification for an old path, or for a folder that only old paths have."""
        if fullname in NEW_PATHS:
            return ModuleSpec(fullname, self)
        return ModuleSpec(fullname, self, is_package=True) if fullname in _FOLDERS else None

    def create_module(self, spec: ModuleSpec) -> None:
        """Let the import system make an empty module."""

    def exec_module(self, module: ModuleType) -> None:
        """Put the module of the new path in place of an empty one."""
        name = module.__name__
        if new := NEW_PATHS.get(name):
            sys.modules[name] = import_module(new)
            warnings.warn(
                f"{name} is {new} now: the old path is only in this release",
                FutureWarning,
                stacklevel=2,
            )


def install() -> None:
    """Make old paths importable in this process."""
    sys.meta_path.append(OldPaths())
