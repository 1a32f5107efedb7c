"""The import contracts find what they forbid, and the graph of imports finds circles."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from docs.check import PACKAGES, ROOT
from docs.repository.layout import SETTINGS, circle_in, entries_of, read_imports

pytestmark = pytest.mark.room

PLANTED = {
    "orchestrator.planted_vllm": ("import vllm.config", "depend on vllm"),
    "kvstore.planted_vllm": ("import vllm", "depend on vllm"),
    "serving.planted": ("import vllm.config", "imports vllm itself"),
    "frontdoor.planted": ("import vllm", "imports vllm itself"),
    "orchestrator.control.planted_time": ("import time", "Control is pure"),
    "kvstore.planted_package": (
        "import banaserve.orchestrator.control.routing.interface",
        "packages below it",
    ),
    "cli.planted": ("import banaserve_route.policies", "imports no other distribution"),
    "base.planted": ("", ""),
}
"""Modules with what they import, and the contract that this breaks."""


@pytest.fixture(scope="module")
def broken_contracts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """By name, what the linter says of each: on a copy of the sources, since it reads files."""
    folder = tmp_path_factory.mktemp("planted")
    left_out = shutil.ignore_patterns("*.so", "*.pyc")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / Path(package).name, ignore=left_out)
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
    assert {name.removeprefix("banaserve.") for name in chains} == set(PLANTED) - {"base.planted"}


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ({"a": "import p.b", "b": "import p.c", "c": ""}, []),
        ({"a": "from p import b", "b": "from p.a import x"}, ["p.a", "p.b"]),
        ({"a": "import p.b", "b": "if TYPE_CHECKING:\n    import p.a"}, ["p.a", "p.b"]),
        ({"a": "import p.b", "b": "def f():\n    import p.a"}, []),
        (
            {"a": "from . import b", "b": "from .c.d import x", "c/d": "from ..a import y"},
            ["p.a", "p.b", "p.c.d"],
        ),
    ],
)
def test_the_graph_of_imports_has_the_circles_of_its_sources(
    sources: dict[str, str], expected: list[str], tmp_path: Path
) -> None:
    for name, source in sources.items():
        path = tmp_path / "p" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source + "\n")
    assert circle_in(read_imports(tmp_path, ["p"])) == expected


def test_a_folder_and_its_neighbour_make_a_circle() -> None:
    graph = {"p.a.x": {"p.b"}, "p.b": {"p.a.y"}, "p.a.y": set()}
    assert circle_in(graph) == []
    assert circle_in(entries_of(graph, "p")) == ["a", "b"]
    assert circle_in(entries_of(graph, "p", apart={"p.a.y"})) == []
