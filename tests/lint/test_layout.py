"""The layout that ARCHITECTURE.md describes, where no other tool checks it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from import_graph import Graph, circles, entries_of, find_modules, read_imports

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "banaserve"
LINKS = ("kernels", "kvstore", "orchestrator")
MODULES = find_modules(ROOT, ["banaserve", "benchmarks"])
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


PLANTED = {
    "orchestrator.planted_vllm": ("import vllm.config", "depend on vllm"),
    "kvstore.planted_vllm": ("import vllm", "depend on vllm"),
    "engine.vllm.planted": ("import vllm.config", "imports vllm itself"),
    "api.planted": ("import vllm", "imports vllm itself"),
    "orchestrator.planted_time": ("import time", "orchestrator is pure"),
    "kvstore.planted_floor": (
        "import banaserve.orchestrator.routing.interface",
        "floors below it",
    ),
    "planted": ("", ""),
}
"""Modules with what they import, and the contract that this breaks."""


@pytest.fixture(scope="module")
def broken_contracts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """By name, what the linter says of each: on a copy of the sources, since it reads files."""
    folder = tmp_path_factory.mktemp("planted")
    shutil.copytree(PACKAGE, folder / "banaserve", ignore=shutil.ignore_patterns("*.so", "*.pyc"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    for name, (source, _) in PLANTED.items():
        path = folder.joinpath("banaserve", *name.split(".")).with_suffix(".py")
        path.write_text(source + "\n")
    lint = Path(sys.executable).parent / "lint-imports"
    done = subprocess.run(
        [lint, "--no-logo", "--no-cache"], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 1, done.stdout + done.stderr
    _, _, broken = done.stdout.partition("Broken contracts\n")
    titles = [contract["name"] for contract in SETTINGS["contracts"]]
    parts = re.split(f"^({'|'.join(map(re.escape, titles))})$", broken, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("planted", PLANTED)
def test_import_linter_finds_a_forbidden_import(
    planted: str, broken_contracts: dict[str, str]
) -> None:
    _, contract = PLANTED[planted]
    named = re.compile(rf"\bbanaserve\.{re.escape(planted)} -> ")
    found = [title for title, said in broken_contracts.items() if named.search(said)]
    assert bool(found) == bool(contract), broken_contracts
    assert not contract or any(contract in title for title in found), broken_contracts


def test_import_linter_finds_nothing_else(broken_contracts: dict[str, str]) -> None:
    chains = re.findall(r"^ *- +(\S+) -> ", "".join(broken_contracts.values()), re.MULTILINE)
    assert {name.removeprefix("banaserve.") for name in chains} == set(PLANTED) - {"planted"}


def test_everything_that_may_not_import_vllm_is_named_in_its_contract():
    contract = next(c for c in SETTINGS["contracts"] if "depend on vllm" in c["name"])
    allowed = {"__main__", "api", "cli", "engine"}
    names = {
        path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for path in PACKAGE.rglob("*.py")
        if path.name != "__init__.py"
    }
    assert {f"banaserve.{name}" for name in names - allowed} <= set(contract["source_modules"])


@pytest.fixture(scope="module")
def declared() -> Graph:
    return read_imports(ROOT, ["banaserve", "benchmarks"]).declared


def test_no_module_imports_one_that_imports_it(declared: Graph) -> None:
    """Imports for types count; those inside functions do not."""
    assert len(declared) > 300
    assert circles(declared) == []


@pytest.mark.parametrize("folder", sorted({name.rpartition(".")[0] for name in MODULES} - {""}))
def test_no_entry_of_a_folder_imports_one_that_imports_it(folder: str, declared: Graph) -> None:
    """A folder stands for all that it holds."""
    assert circles(entries_of(declared, folder, apart=APART)) == []


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
