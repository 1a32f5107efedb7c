"""The top-level folder ``kernels`` never shadows Hugging Face's package of that name.

transformers probes for that package and imports names from it; a regular package ``kernels`` at the
top of the repository, which stands first on the path of whoever starts Python there, breaks
``import transformers``.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROBE = """
import importlib.util
from pathlib import Path
spec = importlib.util.find_spec("kernels")
ours = spec is not None and Path("kernels").resolve() in [
    Path(place).resolve() for place in spec.submodule_search_locations or []
]
assert not ours or spec.origin is None, "a regular package shadows Hugging Face's kernels"
print("ours" if ours else "not ours")
"""
IMPORTS = """
from transformers.utils import is_kernels_available
from transformers import AutoConfig, AutoModelForCausalLM
import importlib.metadata
try:
    importlib.metadata.version("kernels")
    installed = True
except importlib.metadata.PackageNotFoundError:
    installed = False
assert is_kernels_available() <= installed, "transformers takes our folder for its kernels"
"""


def ran(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[0]


@pytest.mark.room
def test_transformers_works_from_the_root_of_the_repository() -> None:
    assert ran("-c", PROBE + IMPORTS) in ("ours", "not ours")


def test_a_safe_path_does_not_find_the_folder() -> None:
    """What is imported there is what is installed, as anywhere else."""
    assert ran("-P", "-c", PROBE) == "not ours"


def test_an_installed_kernels_package_wins_over_the_folder(tmp_path):
    package = tmp_path / "kernels"
    package.mkdir()
    (package / "__init__.py").write_text("CUDAProperties = object\n")
    body = f"import sys; sys.path.append({str(tmp_path)!r}); from kernels import CUDAProperties"
    done = subprocess.run([sys.executable, "-c", body], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
