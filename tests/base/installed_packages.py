"""Packages that are installed for one test: a module and its metadata in a folder of the path."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from banaserve.base.plugins.discovery import Plugin, PluginGroup
from banaserve.cli.plugins import registries, use_plugins

EXAMPLES = Path(__file__).parents[2] / "examples"

ROUTING = """
from dataclasses import dataclass
from typing import ClassVar

from banaserve.base.errors import UserError
from banaserve.orchestrator.control.routing.leg_by_leg import LegByLeg


@dataclass(frozen=True, slots=True)
class ByIdOptions:
    place: int = 0

    def __post_init__(self):
        if self.place < 0:
            raise UserError(f"place is {self.place}: give 0 or more")


class ById(LegByLeg):
    Options: ClassVar = ByIdOptions

    def __init__(self, options, legs, start=0):
        super().__init__(legs, start)
        self._place = options.place

    def choose_prefill(self, request, views, now_s):
        return self.choose_decode(views, now_s)

    def choose_decode(self, views, now_s):
        by_id = sorted(views, key=lambda view: view.id)
        return by_id[min(self._place, len(by_id) - 1)]
"""

REPLICAS = """
from dataclasses import dataclass

from banaserve_route.policies.interface import Need, RoutingDecision, RoutingReason
from banaserve_route.policies.policy import Policy


@dataclass(frozen=True, slots=True)
class ByIdOptions:
    from_end: int = 0


class ById(Policy):
    PRESETS = {"first": ByIdOptions(), "last": ByIdOptions(from_end=1)}
    needs = frozenset()

    def pick(self, request, candidates, fleet):
        place = -1 if self.options.from_end else 0
        return RoutingDecision(candidates[place].id, RoutingReason.TURN)
"""

MIGRATION = """
from dataclasses import dataclass
from typing import ClassVar

from banaserve.orchestrator.control.move_policies.interface import MigrationPlan


@dataclass(frozen=True, slots=True)
class LazyOptions:
    patience_s: float = 10.0


class Lazy:
    Options: ClassVar = LazyOptions

    def __init__(self, options):
        self._options = options

    def plan(self, cluster):
        return MigrationPlan(reason=f"waits {self._options.patience_s:g} s")
"""

TIER = """
from urllib.parse import parse_qs, urlsplit

from banaserve.base.errors import UserError
from banaserve.kvstore.sizes import parse_size
from dictionary_tier import DictionaryTier


class HeapTier(DictionaryTier):
    @classmethod
    def check_url(cls, url):
        parse_size(cls._size(url))

    @classmethod
    def from_url(cls, url):
        return cls(parse_size(cls._size(url)))

    @staticmethod
    def _size(url):
        query = parse_qs(urlsplit(url).query)
        if set(query) != {"size"}:
            raise UserError(f"{url}: write heap://here?size=64MiB")
        return query["size"][0]
"""


def of_others(*groups: PluginGroup) -> list[Plugin]:
    """What ``use_plugins`` finds, without what banaserve's own packages offer."""
    return [one for one in use_plugins(*groups) if not one.package.startswith("banaserve-")]


@contextlib.contextmanager
def plugin_site(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make ``folder``, to which packages can be installed, with the example's tier in it.

    What is registered within the block is forgotten behind it, and modules of ``folder`` too.
    """
    use_plugins(*PluginGroup)
    for registry in registries(*PluginGroup).values():
        registry.names()
        for kept in ("_found", "_offers", "_rivals", "refused"):
            monkeypatch.setattr(registry, kept, dict(getattr(registry, kept)))
    folder.mkdir()
    shutil.copy(EXAMPLES / "store_tier" / "dictionary_tier.py", folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if (folder / f"{name}.py").exists():
            del sys.modules[name]


def routing_plugin(site: Path, name: str = "by_id", package: str = "acme-routing") -> None:
    """Install a package with one routing policy."""
    entry = f"{PluginGroup.ROUTING_POLICIES}:{name}"
    install(site, package, ROUTING, {entry: f"{package.replace('-', '_')}:ById"})


def install(
    folder: Path, name: str, source: str, entry_points: dict[str, str], version: str = "1.0"
) -> Path:
    """Write the package ``name`` with one module to ``folder``; returns its metadata's folder.

    Args:
        entry_points: By ``group:name``, what they refer to.
    """
    module = name.replace("-", "_")
    (folder / f"{module}.py").write_text(source)
    info = folder / f"{module}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = []
    for key, value in entry_points.items():
        group, _, entry = key.partition(":")
        lines += [f"[{group}]", f"{entry} = {value}", ""]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return info


def install_example(package: Path, folder: Path) -> None:
    """Install a package of ``examples`` to ``folder`` by pip."""
    install_examples([package], folder)


def install_examples(packages: Iterable[Path], folder: Path) -> None:
    """Install several by one call of pip, from copies: builds leave files."""
    with tempfile.TemporaryDirectory() as place:
        copies = [shutil.copytree(one, Path(place) / one.name) for one in packages]
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        command += ["--no-build-isolation", "--no-compile", "--target", str(folder)]
        command += map(str, copies)
        subprocess.run(command, check=True, timeout=120)
