"""Folders and files of a set-up."""

from __future__ import annotations

from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parents[1]
ROOT = REQUIREMENTS.parent
VENV = ROOT / ".venv"
DISTRIBUTIONS = (ROOT, ROOT / "bench", ROOT / "route", ROOT / "plugins" / "mooncake")
"""Folders of what is installed of this checkout, in place: the core first."""
PYTHON = VENV / "bin" / "python"
LOG = VENV / "install.log"

CPU_INPUT = REQUIREMENTS / "cpu.txt"
INSTALLER_LOCK = REQUIREMENTS / "installer.lock"
BUILD_LOCK = REQUIREMENTS / "build.lock"
CPU_LOCK = REQUIREMENTS / "cpu.lock"
CUDA_LOCK = REQUIREMENTS / "cuda.lock"
CUDA_DEV_LOCK = REQUIREMENTS / "cuda-dev.lock"
DEV_LOCK = REQUIREMENTS / "dev.lock"
TORCH_CPU_LOCK = REQUIREMENTS / "torch-cpu.lock"
TORCH_PYPI_LOCK = REQUIREMENTS / "torch-pypi.lock"
DEV_FULL = REQUIREMENTS / "dev-full.txt"
MODEL = REQUIREMENTS / "model.txt"


def site_packages() -> Path:
    """The folder that ``.venv`` installs into."""
    (folder,) = (VENV / "lib").glob("python3.*/site-packages")
    return folder
