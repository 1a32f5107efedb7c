"""Main functions of engine cores and guests, and of an engine core started from nothing."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from banaserve.engine.vllm.compat import engine as compat
from banaserve.engine.vllm.compat import runner_hooks
from banaserve.engine.vllm.compat.config import VllmConfig, is_on_cpu
from banaserve.engine.vllm.continuation import output_of
from banaserve.engine.vllm.emulation import install as pacing
from banaserve.engine.vllm.launch import guest_main
from banaserve.engine.vllm.launch.messages import EngineLaunch
from banaserve.engine.vllm.migration.host import install as migration
from banaserve.engine.vllm.migration.rpc.messages import GuestAddress
from banaserve.engine.vllm.settings.engine_args import engine_config, parse_vllm_argv
from banaserve.engine.vllm.settings.environment import INSTANCE_VARIABLE
from banaserve.platform import processes


def redirect_output(log_path: str) -> None:
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def run_engine_core(config: VllmConfig, instance_id: str, handshake_address: str) -> None:
    """Serve as an engine core until ordered to end; returns or raises then."""
    os.environ[INSTANCE_VARIABLE] = f"{instance_id}.{os.getpid()}"
    processes.show_life()
    _keep_files_in(Path(handshake_address.removeprefix("ipc://")).parent)
    compat.install_budget_utility()
    compat.install_notes_utility()
    compat.install_prompt_ending()
    compat.install_continuation()
    if is_on_cpu():
        runner_class = runner_hooks.cpu_model_runner()
        runner_hooks.restore_output(runner_class, output_of)
        compile_model_alone(runner_class, config.model_config.enforce_eager)
        runner_hooks.rewind_discarded_draws(runner_class)
        runner_hooks.rewind_failed_loads(runner_class)
        time_hook = pacing.install(config, runner_class, instance_id)
        migration.install(config, runner_class, time_hook)
    else:
        runner_class = runner_hooks.gpu_model_runner(config)
        if not config.use_v2_model_runner:
            runner_hooks.restore_output(runner_class, output_of)
            runner_hooks.rewind_failed_loads(runner_class)
        migration.install(config, runner_class)
    compat.run_engine_core(config, handshake_address)


def compile_model_alone(runner_class: type[Any], is_eager: bool) -> None:
    """Let no part of an engine compile but the model, and that only where it is to.

    vLLM compiles parts of its sampler at their first use, with --enforce-eager too: all streams
    would wait 10 s for the first request with logprobs, and the engine would die where no compiler
    is. A model that is compiled ahead of time stays so, whatever the stance is.
    """
    if is_eager:
        torch.compiler.set_stance("force_eager")
        return

    def warm_up(call: Callable[..., Any], *args: Any) -> Any:
        done = call(*args)
        torch.compiler.set_stance("force_eager")
        return done

    runner_hooks.wrap_warm_up(runner_class, warm_up)


def run_guest(config: VllmConfig, address: GuestAddress) -> None:
    """Serve as a guest until its host is gone."""
    _keep_files_in(Path(address.folder))
    guest_main.serve(config, address)


def _keep_files_in(folder: Path) -> None:
    """Let vLLM put its sockets and torch its rendezvous file where the run's end removes them.

    A process that is killed removes nothing, so the next one to start removes what it has left.
    """
    own = processes.own_folder(folder)
    os.environ["VLLM_RPC_BASE_PATH"] = str(own)
    tempfile.tempdir = str(own)


def run_launched(said: bytes) -> None:
    """Serve as the engine core that ``said``, the JSON of an ``EngineLaunch``, describes."""
    launch = msgspec.json.decode(said, type=EngineLaunch)
    redirect_output(launch.log_path)
    config = engine_config(parse_vllm_argv(launch.vllm_argv))
    run_engine_core(config, launch.instance_id, launch.handshake_address)
