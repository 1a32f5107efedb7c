"""Location of the checkout, for processes that run ``python -m benchmarks...``."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def environment() -> dict[str, str]:
    """Return this process's environment in which ``benchmarks`` can be imported from anywhere."""
    others = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = [str(ROOT), *(part for part in others if part and part != str(ROOT))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
