"""An engine core as a process started from nothing: for GPUs, which do not survive a fork.

Usage: python -m banaserve.engine.vllm.engine_main LAUNCH_JSON
"""

from __future__ import annotations

import sys

import msgspec

from banaserve.engine.vllm.engine_process import (
    die_with_parent,
    redirect_output,
    run_engine_core,
)
from banaserve.engine.vllm.options import engine_config


class Launch(msgspec.Struct, frozen=True):
    """What the launcher passes on the command line."""

    instance_id: str
    vllm_argv: list[str]
    handshake_address: str
    log_path: str


def main() -> None:
    launch = msgspec.json.decode(sys.argv[1], type=Launch)
    die_with_parent()
    redirect_output(launch.log_path)
    config = engine_config(launch.vllm_argv)
    run_engine_core(config, launch.instance_id, launch.handshake_address)


if __name__ == "__main__":
    main()
