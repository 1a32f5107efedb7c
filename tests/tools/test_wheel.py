"""The wheel: what is in it, and that its native part works where nothing else is installed.

Packs what this checkout was built with rather than compiling it again; `make wheel-check` starts
from the sources and asks auditwheel.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from banaserve import _native

pytestmark = pytest.mark.room

ROOT = Path(__file__).parents[2]
# What every manylinux has.
SYSTEM = {"libstdc++.so.6", "libgcc_s.so.1", "libm.so.6", "libc.so.6", "ld-linux-x86-64.so.2"}
SYSTEM |= {"libpthread.so.0", "libdl.so.2", "librt.so.1", "ld-linux-aarch64.so.1"}
COPY = """
import array, ctypes
from banaserve import _native
zero = array.array("q", [0])
source, target = ctypes.create_string_buffer(b"kv cache"), ctypes.create_string_buffer(9)
_native.copy_regions(
    ctypes.addressof(target), ctypes.addressof(source), zero, zero, 9, 9, 9, streaming=True
)
assert target.value == b"kv cache"
print(_native.__file__)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("wheel")
    library = work / f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}" / "banaserve"
    library.mkdir(parents=True)
    # As new as can be, so that setuptools leaves it alone.
    shutil.copyfile(_native.__file__, library / Path(_native.__file__).name)
    subprocess.run(
        [
            sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", str(work),
            "build", "--build-base", str(work), "--build-lib", str(library.parent),
            "bdist_wheel", "--bdist-dir", str(work / "bdist"), "--dist-dir", str(work / "dist"),
        ],
        cwd=ROOT,
        check=True,
        env={**os.environ, "CC": "false", "CXX": "false", "BANASERVE_CUDA": ""},
    )  # fmt: skip
    (found,) = (work / "dist").glob("*.whl")
    return found


def test_it_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "banaserve").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == modules
    assert {name.split("/")[0] for name in names} == {
        "banaserve", wheel.name.split("-cp")[0] + ".dist-info",
    }  # fmt: skip
    assert sum(name.endswith(".so") for name in names) == 1
    # From 3.12 on one wheel is for all versions.
    assert ("-abi3-" in wheel.name) == (sys.version_info >= (3, 12))
    assert not any("py3-none" in name for name in (wheel.name,)), "it is not pure"


def test_it_needs_only_what_every_system_has(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        (name,) = (name for name in packed.namelist() if name.endswith(".so"))
        library = packed.extract(name, tmp_path)
    told = subprocess.run(
        ["readelf", "-d", library], check=True, capture_output=True, text=True
    ).stdout
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", told))
    assert "libc.so.6" in needed
    assert needed <= SYSTEM


def test_its_native_part_works_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "empty", symlinks=True)
    python = tmp_path / "empty" / "bin" / "python"
    subprocess.run(
        [
            sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet",
            "--no-deps", "--no-index", "--no-compile", str(wheel),
        ],
        check=True,
        cwd=tmp_path,
    )  # fmt: skip
    # -I: neither this folder nor the environment's variables put the checkout in its way.
    ended = subprocess.run(
        [python, "-I", "-c", COPY], check=True, cwd=tmp_path, capture_output=True, text=True
    )
    assert Path(ended.stdout.strip()).is_relative_to(tmp_path / "empty")
