"""The layout that ARCHITECTURE.md describes, where no other tool checks it."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from import_graph import circles, entries_of, read_imports

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "banaserve"
LINKS = ("kernels", "kvstore", "orchestrator")
IMPORTS = read_imports(ROOT, ["banaserve", "benchmarks"])
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]

APART = {"banaserve.engine.vllm.migration.controller"}
"""Folders that count as entries of the folder above their own: the controller runs in the server's
process and starts guests through the launcher, the rest of migration in engines."""


@pytest.mark.parametrize("name", LINKS)
def test_a_top_level_name_is_a_relative_link_into_the_package(name):
    assert os.readlink(ROOT / name) == f"banaserve/{name}"
    assert (ROOT / name).is_dir()


@pytest.mark.parametrize("name", LINKS)
def test_a_linked_folder_is_no_regular_package(name):
    assert not (PACKAGE / name / "__init__.py").exists()


def test_tests_are_no_packages_and_shadow_nothing():
    assert not list((ROOT / "tests").rglob("__init__.py"))
    assert not (ROOT / "conftest.py").exists()
    assert not (ROOT / "tests" / "kernels").exists()
    assert not (ROOT / "benchmarks" / "kernels").exists()


def test_import_linter_knows_every_folder_without_init():
    folders = {
        path.parent.relative_to(PACKAGE).parts[0]
        for path in PACKAGE.rglob("*.py")
        if path.parent != PACKAGE
    }
    hidden = {name for name in folders if not (PACKAGE / name / "__init__.py").exists()}
    assert {f"banaserve.{name}" for name in hidden} | {"banaserve"} == set(
        SETTINGS["root_packages"]
    )


def test_no_folder_below_the_first_level_is_a_regular_package_in_a_namespace():
    # grimp takes such a folder for a portion of its own, and import-linter loses its place.
    for init in PACKAGE.rglob("__init__.py"):
        assert init.parent == PACKAGE or (init.parent.parent / "__init__.py").exists(), init


@pytest.mark.parametrize(
    ("planted", "source", "broken"),
    [
        ("banaserve/orchestrator/planted.py", "import vllm.config", "depend on vllm"),
        ("banaserve/kvstore/planted.py", "import vllm", "depend on vllm"),
        ("banaserve/engine/vllm/planted.py", "import vllm.config", "imports vllm itself"),
        ("banaserve/api/planted.py", "import vllm", "imports vllm itself"),
        ("banaserve/orchestrator/planted.py", "import time", "orchestrator is pure"),
        (
            "banaserve/kvstore/planted.py",
            "import banaserve.orchestrator.routing.interface",
            "floors below it",
        ),
        ("banaserve/planted.py", "", None),
    ],
)
def test_import_linter_finds_a_forbidden_import(planted, source, broken, tmp_path):
    """A copy of the sources with one more file, since the linter reads files."""
    for path in PACKAGE.rglob("*.py"):
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    (tmp_path / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
    (tmp_path / planted).write_text(source + "\n")
    lint = Path(sys.executable).parent / "lint-imports"
    done = subprocess.run(
        [lint, "--no-logo", "--no-cache"], cwd=tmp_path, capture_output=True, text=True
    )
    lines = done.stdout.splitlines()
    if broken is None:
        assert done.returncode == 0, done.stdout
        return
    assert done.returncode == 1, done.stdout + done.stderr
    assert any(broken in line and " BROKEN" in line for line in lines), done.stdout


def test_everything_that_may_not_import_vllm_is_named_in_its_contract():
    contract = next(c for c in SETTINGS["contracts"] if "depend on vllm" in c["name"])
    allowed = {"__main__", "api", "cli", "engine"}
    names = {
        path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for path in PACKAGE.rglob("*.py")
        if path.name != "__init__.py"
    }
    assert {f"banaserve.{name}" for name in names - allowed} <= set(contract["source_modules"])


def test_no_module_imports_one_that_imports_it() -> None:
    """Imports for types count; those inside functions do not."""
    assert len(IMPORTS.declared) > 300
    assert circles(IMPORTS.declared) == []


@pytest.mark.parametrize(
    "folder", sorted({name.rpartition(".")[0] for name in IMPORTS.declared} - {""})
)
def test_no_entry_of_a_folder_imports_one_that_imports_it(folder: str) -> None:
    """A folder stands for all that it holds."""
    assert circles(entries_of(IMPORTS.declared, folder, apart=APART)) == []


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ({"a": "import p.b", "b": "import p.c", "c": ""}, []),
        ({"a": "from p import b", "b": "from p.a import x"}, [["p.a", "p.b"]]),
        ({"a": "import p.b", "b": "if TYPE_CHECKING:\n    import p.a"}, [["p.a", "p.b"]]),
        ({"a": "import p.b", "b": "def f():\n    import p.a"}, []),
        (
            {"a": "from . import b", "b": "from .c.d import x", "c/d": "from ..a import y"},
            [["p.a", "p.b", "p.c.d"]],
        ),
    ],
)
def test_the_graph_of_imports_has_the_circles_of_its_sources(
    sources: dict[str, str], expected: list[list[str]], tmp_path: Path
) -> None:
    for name, source in sources.items():
        path = tmp_path / "p" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source + "\n")
    assert circles(read_imports(tmp_path, ["p"]).declared) == expected


def test_a_folder_and_its_neighbour_make_a_circle() -> None:
    graph = {"p.a.x": {"p.b"}, "p.b": {"p.a.y"}, "p.a.y": set()}
    assert circles(graph) == []
    assert circles(entries_of(graph, "p")) == [["a", "b"]]
    assert circles(entries_of(graph, "p", apart={"p.a.y"})) == []
