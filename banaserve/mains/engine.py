"""Main functions of engine cores and guests, and of an engine core in a new (unforked) process."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from banaserve.base.platform import processes
from banaserve.contracts.environment import INSTANCE_VARIABLE
from banaserve.engine.compat import engine as compat
from banaserve.engine.compat.config import VllmConfig, is_on_cpu
from banaserve.engine.compat.scheduler import install_states
from banaserve.engine.engine_args import engine_config, parse_vllm_argv
from banaserve.engine.runner_setup import prepare_runners
from banaserve.mains import guest
from banaserve.migration.host import install as migration
from banaserve.pacing import install as pacing
from banaserve.serving.launch.messages import Order, StartGuest


def redirect_output(log_path: str) -> None:
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def run_engine_core(config: VllmConfig, instance_id: str, handshake_address: str) -> None:
    """Serve as an engine core until ordered to end; then return or raise."""
    os.environ[INSTANCE_VARIABLE] = f"{instance_id}.{os.getpid()}"
    processes.show_life()
    _keep_files_in(Path(handshake_address.removeprefix("ipc://")).parent)
    compat.install_utilities()
    compat.install_prompt_ending()
    compat.install_output_guard()
    compat.install_continuation()
    compat.install_backends()
    install_states()
    runner_class = prepare_runners(config)
    if is_on_cpu():
        time_hook = pacing.install(config, runner_class, instance_id)
        migration.install(config, runner_class, time_hook)
    else:
        migration.install(config, runner_class)
    compat.run_engine_core(config, handshake_address)


def _keep_files_in(folder: Path) -> None:
    """Put vLLM's sockets and torch's rendezvous file into a folder that is removed with the run.

    A killed process removes nothing, so the next process to start removes its files.
    """
    own = processes.own_folder(folder)
    os.environ["VLLM_RPC_BASE_PATH"] = str(own)
    tempfile.tempdir = str(own)


def run_order(order: Order, usual: VllmConfig | None = None) -> None:
    """Be the engine core or the guest of an order.

    Args:
        usual: vLLM's configuration if the order has no options.
    """
    config = engine_config(parse_vllm_argv(list(order.vllm_argv))) if order.vllm_argv else usual
    assert config is not None, "an order to a new process has options"
    if isinstance(order, StartGuest):
        _keep_files_in(Path(order.address.folder))
        guest.serve(config, order.address)
    else:
        run_engine_core(config, order.instance_id, order.handshake_address)
