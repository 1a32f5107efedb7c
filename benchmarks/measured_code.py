"""Code that each benchmark measures, and whether it has changed since a result was measured.

A result is stale if a statement of that code differs from the commit that the result names.
Comments, docstrings, the layout of lines and moves of files do not count; of imports the names do.
If the commit is not in the history, as after a rebase, the commit is used instead in which the
result's file began to name it: a later change of the file's layout does not make a result younger.
"""

from __future__ import annotations

import ast
import subprocess
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType

_SIMULATOR = ("banaserve/sim", "bench/banaserve_bench/simulation", "banaserve/orchestrator/control")
_ELASTIC = (*_SIMULATOR, "banaserve/orchestrator/planner", "benchmarks/elastic")
_STORE = ("banaserve/kvstore", "csrc")
_REQUESTS = ("banaserve/serving/requests", "banaserve/engine/connector", *_STORE)
_SERVER = (*_REQUESTS, "banaserve/frontdoor", "banaserve/orchestrator")
_MOVES = ("banaserve/migration", "banaserve/transport")
_TRACED = ("benchmarks/drivers/traced.py", "benchmarks/drivers/traced_connector.py")
_SILICON = (*_SIMULATOR, "bench/banaserve_bench/silicon", "benchmarks/silicon.py")
_LOOPS = ("benchmarks/whole_runs.py", "benchmarks/closed_loop.py")
_PACE = ("banaserve/pacing", "banaserve/orchestrator/control/costs")

MEASURED: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "agents": (*_SERVER, *_PACE, "benchmarks/agents"),
        "break-even": (*_SIMULATOR, "benchmarks/break_even"),
        "compare": (
            *_SERVER,
            *_MOVES,
            *_PACE,
            "route/banaserve_route/balancer",
            "bench/banaserve_bench/compare",
        ),
        "elastic": _ELASTIC,
        "elastic-cpu": (*_SERVER, "banaserve/orchestrator/planner", "benchmarks/elastic_cpu"),
        "elastic-paced": (*_ELASTIC, *_SERVER, *_PACE),
        "front": ("banaserve/frontdoor", "banaserve/serving/requests", "benchmarks/front.py"),
        "handover": (*_REQUESTS, "benchmarks/handover.py"),
        "kvstore": (*_STORE, "benchmarks/kvstore"),
        "migration": (*_MOVES, "benchmarks/migration.py"),
        "network": (
            "banaserve/kvstore/peers",
            "banaserve/kvstore/daemon/connections",
            "banaserve/kvstore/daemon/pushes",
            "banaserve/transport",
            "benchmarks/network",
        ),
        "orchestrator": (*_SIMULATOR, "benchmarks/orchestrator.py"),
        "pacing": (*_PACE, "benchmarks/pacing.py"),
        "pipeline": (*_STORE, "banaserve/engine/connector", "benchmarks/pipeline.py", *_TRACED),
        "plan": (
            *_SILICON,
            *_PACE,
            *_SERVER,
            *_LOOPS,
            "bench/banaserve_bench/plan",
            "benchmarks/plan",
        ),
        "prefix-ttft": (*_REQUESTS, "benchmarks/prefix_ttft.py"),
        "recovery": (*_REQUESTS, "banaserve/serving/instances", "benchmarks/recovery"),
        "router": ("route/banaserve_route/balancer", "banaserve/base/net", "benchmarks/router"),
        "routers": (
            "route/banaserve_route/policies",
            "route/banaserve_route/sim",
            "benchmarks/routers",
        ),
        "silicon": _SILICON,
        "silicon-runs": (*_SILICON, *_LOOPS),
        "silicon-table": (
            "bench/banaserve_bench/silicon/aiconfigurator.py",
            "bench/banaserve_bench/silicon/linear.py",
            "benchmarks/step_table.py",
            "benchmarks/whole_runs.py",
        ),
        "simulate-paper": (
            *_SIMULATOR,
            "banaserve/orchestrator/planner",
            "benchmarks/simulate_paper",
        ),
        "simulate-seeds": (
            "route/banaserve_route/policies",
            "route/banaserve_route/sim",
            "benchmarks/routers/loads.py",
            "benchmarks/simulate_seeds/cases.py",
            "benchmarks/simulate_seeds/figures.py",
        ),
    }
)
"""Folders and files by benchmark, from the top of the repository."""

WRITTEN_FROM_RESULTS = frozenset({"bench/banaserve_bench/silicon/whole_runs.toml"})
"""Files that are written from a result, which they would make stale."""


class History:
    """History of a repository, as far as staleness depends on it; runs git and changes nothing."""

    def __init__(self, top: Path) -> None:
        self._top = top
        self._changes_since: dict[str, Sequence[tuple[str, str]]] = {}

    def is_whole(self) -> bool:
        """Return whether all commits are there: not in a shallow clone or outside a repository."""
        return self._git("rev-parse", "--is-shallow-repository").strip() == "false"

    def measured_at(self, commit: str | None, file: Path) -> str | None:
        """Return the commit whose code a result shows; None for a file that is not committed.

        Args:
            commit: The commit that the result names.
            file: The result's file.
        """
        if commit and self._is_ancestor(commit):
            return commit
        began_to_name = [f"-S{commit}"] if commit else []
        found = self._git("log", "-1", "--format=%H", *began_to_name, "--", str(file))
        return found.strip() or None

    def has_changed(self, commit: str, paths: Sequence[str]) -> bool:
        """Return whether a statement below ``paths`` differs between ``commit`` and the files."""
        return any(
            self._differs(commit, before, name)
            for before, name in self._changes(commit)
            if name not in WRITTEN_FROM_RESULTS
            and any(name == path or name.startswith(f"{path}/") for path in paths)
        )

    def _changes(self, commit: str) -> Sequence[tuple[str, str]]:
        """Return the changed files since ``commit``: path at that commit, path now."""
        if commit not in self._changes_since:
            # A third of a short file may be imports, which name other modules after a move.
            lines = self._git("diff", "--name-status", "-M40%", "-l0", commit).splitlines()
            parts = [line.split("\t") for line in lines]
            self._changes_since[commit] = [(names[0], names[-1]) for _, *names in parts]
        return self._changes_since[commit]

    def _is_ancestor(self, commit: str) -> bool:
        command = ["git", "-C", str(self._top), "merge-base", "--is-ancestor", commit, "HEAD"]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    def _differs(self, commit: str, before: str, name: str) -> bool:
        path = self._top / name
        if path.suffix == ".md":
            return False
        old = self._git("show", f"{commit}:{before}")
        now = path.read_text() if path.is_file() else ""
        if path.suffix == ".toml":
            return tomllib.loads(old) != tomllib.loads(now)
        return old != now if path.suffix != ".py" else _statements(old) != _statements(now)

    def _git(self, *arguments: str) -> str:
        command = ["git", "-C", str(self._top), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout


@cache
def _statements(source: str) -> str:
    """Return a module without comments, docstrings and the layout of its lines.

    Of imports only the names count: the modules that hold them may have moved.
    """
    tree = ast.parse(source)
    imported = {
        alias.name.rpartition(".")[2]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [one for one in node.body if not _is_left_out(one)]
    return f"{sorted(imported)} {ast.dump(tree)}"


def _is_left_out(node: ast.stmt) -> bool:
    """Return whether a statement is an import, or only a text as docstrings are."""
    return isinstance(node, ast.Import | ast.ImportFrom) or (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
