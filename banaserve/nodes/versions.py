"""Version that must be the same on a server and its nodes."""

from __future__ import annotations

from banaserve.base.platform.packages import installed_version, vllm_version


def own_version() -> str:
    """Return the versions of banaserve and vLLM on this machine, in one line."""
    vllm = vllm_version()
    engine = f"vLLM {vllm}" if vllm else "no vLLM"
    return f"banaserve {installed_version('banaserve')}, {engine}"
