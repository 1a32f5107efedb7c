"""Code that each benchmark measures, and whether it has changed since a result was measured.

A result is stale if a statement of that code differs from the commit that the result names.
Comments, docstrings and the layout of lines do not count. If the commit is not in the history, as
after a rebase, the commit is used instead in which the result's file began to name it: a later
change of the file's layout does not make a result younger.
"""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType

_SIMULATOR = ("banaserve/sim", "banaserve/costs", "banaserve/orchestrator")
_ELASTIC = (*_SIMULATOR, "banaserve/elastic", "benchmarks/elastic")
_STORE = ("banaserve/kvstore", "csrc")
_REQUESTS = ("banaserve/engine/vllm/requests", "banaserve/engine/vllm/kv_connector", *_STORE)
_SERVER = (*_REQUESTS, "banaserve/api", "banaserve/orchestrator", "banaserve/controller")
_MOVES = ("banaserve/engine/vllm/migration", "banaserve/transport")
_PACE = ("banaserve/engine/vllm/emulation", "banaserve/costs")

MEASURED: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "break-even": (*_SIMULATOR, "benchmarks/break_even"),
        "cases": (*_SIMULATOR, *_SERVER, *_MOVES, *_PACE, "benchmarks/cases.py"),
        "cells": (*_SIMULATOR, "banaserve/elastic", "benchmarks/cells"),
        "compare": (*_SERVER, *_MOVES, *_PACE, "banaserve/balancer", "banaserve/bench/compare"),
        "copies": ("csrc/block_copy.cpp", "csrc/block_copy.h", "benchmarks/copies.py"),
        "elastic": _ELASTIC,
        "elastic-cpu": (*_SERVER, "banaserve/elastic", "benchmarks/elastic_cpu"),
        "elastic-paced": (*_ELASTIC, *_SERVER, *_PACE),
        "front": ("banaserve/api", "banaserve/engine/vllm/requests", "benchmarks/front.py"),
        "handover": (*_REQUESTS, "benchmarks/handover.py"),
        "handover-moved": (*_REQUESTS, *_MOVES, "benchmarks/handover_moved.py"),
        "kvstore": (*_STORE, "benchmarks/kvstore"),
        "migration": (*_MOVES, "benchmarks/migration.py"),
        "network": ("banaserve/kvstore/peers", "banaserve/transport", "benchmarks/network"),
        "orchestrator": (*_SIMULATOR, "benchmarks/orchestrator.py"),
        "overlap": (*_MOVES, *_PACE, "benchmarks/overlap"),
        "pacing": (*_PACE, "benchmarks/pacing.py"),
        "pipeline": (*_STORE, "banaserve/engine/vllm/kv_connector", "benchmarks/pipeline.py"),
        "prefix-ttft": (*_REQUESTS, "benchmarks/prefix_ttft.py"),
        "rebalancing": (*_REQUESTS, *_PACE, "banaserve/orchestrator", "benchmarks/rebalancing.py"),
        "recovery": (*_REQUESTS, "banaserve/engine/vllm/liveness", "benchmarks/recovery"),
        "regions": ("banaserve/balancer", "banaserve/orchestrator/replicas", *_SIMULATOR),
        "router": ("banaserve/balancer", "banaserve/net", "benchmarks/router"),
        "short-prompts": (*_REQUESTS, "benchmarks/short_prompts.py"),
        "simulate-paper": (*_SIMULATOR, "banaserve/elastic", "benchmarks/simulate_paper"),
        "simulate-seeds": (*_SIMULATOR, "benchmarks/simulate_seeds"),
        "stall": (*_REQUESTS, "benchmarks/stall.py"),
        "timeline": (*_REQUESTS, "banaserve/engine/vllm/tracing", "benchmarks/timeline.py"),
        "ui": ("banaserve/ui", "benchmarks/ui.py"),
    }
)
"""Folders and files by benchmark, from the top of the repository."""


class History:
    """History of a repository, as far as staleness depends on it; runs git and changes nothing."""

    def __init__(self, top: Path) -> None:
        self._top = top

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
        names = self._git("diff", "--name-only", commit, "--", *paths).splitlines()
        return any(self._differs(commit, name) for name in names)

    def _is_ancestor(self, commit: str) -> bool:
        command = ["git", "-C", str(self._top), "merge-base", "--is-ancestor", commit, "HEAD"]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    def _differs(self, commit: str, name: str) -> bool:
        path = self._top / name
        if path.suffix != ".py" or not path.is_file():
            return path.suffix != ".md"
        before = self._git("show", f"{commit}:{name}")
        return _statements(before) != _statements(path.read_text())

    def _git(self, *arguments: str) -> str:
        command = ["git", "-C", str(self._top), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout


@cache
def _statements(source: str) -> str:
    """Return a module without comments, docstrings and the layout of its lines."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [one for one in node.body if not _is_words(one)]
    return ast.dump(tree)


def _is_words(node: ast.stmt) -> bool:
    """Return whether a statement is only a text, as docstrings of modules and names are."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
