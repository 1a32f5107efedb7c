"""Version that a server and its nodes have to share."""

from __future__ import annotations

from banaserve.platform.packages import installed_version, vllm_version


def own_version() -> str:
    """Of banaserve and vLLM here, in one line."""
    vllm = vllm_version()
    engine = f"vLLM {vllm}" if vllm else "no vLLM"
    return f"banaserve {installed_version('banaserve')}, {engine}"
