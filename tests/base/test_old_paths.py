"""Import paths of the last release still lead to their modules, and say the new ones."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys

import pytest

from banaserve.old_paths import NEW_PATHS


@pytest.mark.parametrize(("old", "new"), NEW_PATHS.items())
def test_an_old_path_is_found_and_its_new_one_exists(old: str, new: str) -> None:
    assert importlib.util.find_spec(old) is not None
    found = importlib.util.find_spec(new)
    assert found is not None, new
    assert found.origin is not None, new


def test_an_old_path_gives_the_module_itself_and_one_line() -> None:
    body = (
        "from banaserve.engine.vllm.migration.api import MigrationRequest as old\n"
        "from banaserve.contracts.migration_api import MigrationRequest as new\n"
        "import banaserve.types, banaserve.base.types\n"
        "assert old is new and banaserve.types is banaserve.base.types\n"
        "assert banaserve.base.types.__spec__.name == 'banaserve.base.types'\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", body], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "is banaserve." in line]
    assert len(lines) == 2
    assert "banaserve.types is banaserve.base.types now" in done.stderr


def test_a_path_that_never_was_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("banaserve.engine.vllm.nothing")
