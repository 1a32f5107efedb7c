"""Environment of the tests: variables that a user has exported change none of their results.

``clean`` runs before anything imports a library that reads them. A test that needs a variable sets
it itself.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

_REMOVED = ("HF_", "HUGGING", "TRANSFORMERS_", "VLLM_", "BANASERVE_", "OPENAI_", "OTEL_", "MC_")
"""Beginnings of names that the product or its libraries read."""

_TERMINAL = ("COLUMNS", "LINES")
"""Names that make help texts and tables break their lines elsewhere."""

_PROXIES = tuple(
    word
    for scheme in ("http", "https", "ftp", "all", "no")
    for word in (f"{scheme}_proxy", f"{scheme}_proxy".upper())
)

_KEPT = (
    # Where files are that take long to fetch or to make, not what is read from them.
    "HF_HOME",
    "HF_HUB_CACHE",
    "BANASERVE_CACHE",
    "BANASERVE_DATA",
    # How far tests go, and where they write: set by the Makefile.
    "BANASERVE_TEST_",
    "BANASERVE_MIGRATION_",
    "BANASERVE_NEMESIS_",
    "BANASERVE_SOAK_",
    "BANASERVE_DIFFERENTIAL_",
    "BANASERVE_PICTURES",
    "BANASERVE_SUPPORT",
    "BANASERVE_NULL_GPU_",
    "BANASERVE_CUDA",
)
"""Beginnings of names that stay all the same."""


def foreign(names: Mapping[str, str]) -> list[str]:
    """Names among ``names`` that no test may inherit."""
    return [
        name
        for name in names
        if name in (*_TERMINAL, *_PROXIES)
        or (name.startswith(_REMOVED) and not name.startswith(_KEPT))
    ]


def clean() -> None:
    """Remove from this process's environment what no test may inherit."""
    for name in foreign(os.environ):
        del os.environ[name]
