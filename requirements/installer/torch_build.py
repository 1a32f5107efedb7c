"""Choice of the build of torch: the CPU one where an index offers it, PyPI's own otherwise."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from installer import places, tools
from installer.console import Problem, say

_CPU_BYTES = 4_000_000_000
_PYPI_BYTES = 7_500_000_000


@dataclass(frozen=True)
class TorchBuild:
    """One way to torch.

    Attributes:
        index: Where it comes from beside what pip is configured with.
        needs_bytes: On the disk, with all that is installed beside it.
    """

    lock: Path
    needs_bytes: int
    index: str = ""


def choose(tool: tools.Tool) -> TorchBuild:
    """Stay with what is installed; otherwise ask one place after another, and say what was found.

    Raises:
        Problem: No place offers torch.
    """
    index = os.environ.get("TORCH_INDEX", "")
    cpu = tools.torch_version(places.TORCH_CPU_LOCK)
    pypi = tools.torch_version(places.TORCH_PYPI_LOCK)
    installed = _installed()
    if installed == cpu:
        return TorchBuild(places.TORCH_CPU_LOCK, 0)
    if installed == pypi:
        return TorchBuild(places.TORCH_PYPI_LOCK, 0)
    if tool.offers(places.TORCH_CPU_LOCK):
        say(f"torch {cpu} is offered by pip as configured")
        return TorchBuild(places.TORCH_CPU_LOCK, _CPU_BYTES)
    if index and tool.offers(places.TORCH_CPU_LOCK, index):
        say(f"torch {cpu} comes from {index} (TORCH_INDEX names another)")
        return TorchBuild(places.TORCH_CPU_LOCK, _CPU_BYTES, index)
    if tool.offers(places.TORCH_PYPI_LOCK):
        say(
            f"neither pip as configured nor TORCH_INDEX ({index or 'empty'}) offers torch {cpu}: "
            f"taking PyPI's torch {pypi}, whose CUDA packages are never used here: 2.8 GB to "
            "download, 6.3 GB on disk"
        )
        return TorchBuild(places.TORCH_PYPI_LOCK, _PYPI_BYTES)
    raise Problem(
        f"found no torch {pypi}: neither pip as configured nor TORCH_INDEX ({index or 'empty'}) "
        "offers it; look at the network and at `pip config list`, or name a mirror in TORCH_INDEX"
    )


def _installed() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        return ""
