"""A guest as a process started from nothing, where processes do not survive a fork.

Usage: python -m banaserve.engine.vllm.migration.guest_main LAUNCH_JSON
"""

from __future__ import annotations

import sys

import msgspec

from banaserve.engine.vllm.migration.guest_address import GuestAddress


class GuestLaunch(msgspec.Struct, frozen=True):
    """What the launcher passes on the command line.

    Attributes:
        vllm_argv: Of the host's engine.
    """

    address: GuestAddress
    vllm_argv: list[str]
    log_path: str


def main() -> None:
    launch = msgspec.json.decode(sys.argv[1], type=GuestLaunch)
    from banaserve.engine.vllm.engine_process import die_with_parent, redirect_output, run_guest
    from banaserve.engine.vllm.options import engine_config

    die_with_parent()
    redirect_output(launch.log_path)
    run_guest(engine_config(launch.vllm_argv), launch.address)


if __name__ == "__main__":
    main()
