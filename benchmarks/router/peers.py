"""Routers of other projects, each in an environment of its own that is created if missing."""

from __future__ import annotations

import subprocess
import venv
from collections.abc import Sequence
from pathlib import Path

from banaserve.base.errors import UserError
from banaserve_bench.loadgen.servers import free_port

PEERS = {"vllm-router": "vllm-router==0.1.17", "sglang-router": "sglang-router==0.3.2"}
_MODULES = {
    "vllm-router": "vllm_router.launch_router",
    "sglang-router": "sglang_router.launch_router",
}
_INSTALL_S = 600.0


def peer_command(folder: Path, name: str, policy: str, urls: Sequence[str]) -> list[str]:
    """Return the command of the router ``name`` in front of ``urls``, without ``--port``.

    Raises:
        UserError: The router could not be installed below ``folder``.
    """
    return [
        str(_environment(folder, name)), "-m", _MODULES[name], "--host", "127.0.0.1",
        "--policy", policy,
        "--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port()),
        "--log-level", "error", "--worker-urls", *urls,
    ]  # fmt: skip


def _environment(folder: Path, name: str) -> Path:
    """Return the Python of the environment that has the router, created if missing."""
    python = folder / name / "bin" / "python"
    if not python.exists():
        venv.create(folder / name, with_pip=True)
    try:
        install = [str(python), "-m", "pip", "install", "--quiet", PEERS[name]]
        subprocess.run(install, check=True, capture_output=True, text=True, timeout=_INSTALL_S)
    except (OSError, subprocess.SubprocessError) as error:
        why = getattr(error, "stderr", None) or str(error)
        raise UserError(f"cannot install {PEERS[name]}: {str(why).strip()[-200:]}") from None
    return python
