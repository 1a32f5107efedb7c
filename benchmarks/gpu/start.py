"""Start of ``make gpu-report`` on any Python: unpacks the kit if one was brought along.

``python -m benchmarks.gpu.start`` in the top folder of the checkout. Imports the standard library
alone. Without a kit, what is installed is used. Nothing is installed.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from benchmarks.gpu.kit_files import KIT, KitError, unpack

_ROOT = Path(__file__).resolve().parents[2]
_BESIDE = ("bench", "route", "plugins/mooncake")
"""Folders whose packages the report imports beside the core; none is installed."""
_WITH_KIT = "torch", "rich"
_WITHOUT_KIT = *_WITH_KIT, "msgspec", "vllm"


def main(argv: list[str]) -> NoReturn:
    """Run the report in place of this process; exit with 2 if it cannot run here."""
    try:
        variables = prepare(_ROOT)
    except KitError as error:
        print(f"gpu-report: {error}", file=sys.stderr)
        sys.exit(2)
    command = [sys.executable, "-m", "benchmarks", "gpu-report", *argv]
    os.execve(sys.executable, command, {**os.environ, **variables})


def prepare(root: Path) -> dict[str, str]:
    """Unpack the kit of a checkout, if it has one; return the report's environment variables.

    Raises:
        KitError: The kit cannot be used, or this Python lacks what the kit does not hold.
    """
    has_kit = (root / KIT).is_dir()
    for name in _WITH_KIT if has_kit else _WITHOUT_KIT:
        if find_spec(name) is None:
            raise KitError(
                f"{sys.executable} has no {name}: name a Python with torch in GPU_PYTHON, and "
                "bring a kit along (`make gpu-kit`)"
            )
    beside = [str(root / name) for name in _BESIDE]
    places = [str(root), *beside, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    variables = {"HF_HUB_OFFLINE": "1", "TRITON_CACHE_DIR": str(root / "build" / "triton")}
    if has_kit:
        print(f"unpacking {KIT} ...", flush=True)
        site = unpack(root / KIT, root)
        places.insert(0, str(site))
        variables["BANASERVE_CACHE"] = str(site / ".banaserve" / "cache")
        variables["VLLM_USE_DEEP_GEMM"] = "0"  # not in the kit
    return {**variables, "PYTHONPATH": os.pathsep.join(places)}


if __name__ == "__main__":
    main(sys.argv[1:])
