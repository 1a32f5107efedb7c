"""The import contracts find what they forbid."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from docs.repository.findings import CODE, ROOT
from docs.repository.layout import SETTINGS

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
CIRCLE = {"kvstore.round_a": "kvstore.round_b", "kvstore.round_b": "kvstore.round_a"}
"""Modules with the module that they import."""


@pytest.fixture(scope="module")
def broken_contracts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """By name, what the linter says of each: on a copy of the sources, since it reads files."""
    folder = tmp_path_factory.mktemp("planted")
    left_out = shutil.ignore_patterns("*.so", "*.pyc")
    for package in CODE:
        shutil.copytree(ROOT / package, folder / Path(package).name, ignore=left_out)
    shutil.copy(ROOT / "pyproject.toml", folder)
    circle = {name: f"import banaserve.{other}" for name, other in CIRCLE.items()}
    for name, source in ({name: source for name, (source, _) in PLANTED.items()} | circle).items():
        path = folder.joinpath("banaserve", *name.split(".")).with_suffix(".py")
        path.write_text(source + "\n")
    lint = Path(sys.executable).parent / "lint-imports"
    # Without this process's PYTHONPATH, which could name the sources that the copy is of.
    done = subprocess.run(
        [lint, "--no-logo", "--no-cache"], cwd=folder, env={}, capture_output=True, text=True
    )
    _, header, broken = done.stdout.partition("Broken contracts\n")
    assert header, done.stdout + done.stderr
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
    said = "".join(broken_contracts.values())
    chains = re.findall(r"^ *- +(banaserve\S+) -> ", said, re.MULTILINE)
    assert {name.removeprefix("banaserve.") for name in chains} == set(PLANTED) - {"base.planted"}
    assert re.findall("No cycles are allowed in (.*)\\.", said) == ["banaserve.kvstore"]
