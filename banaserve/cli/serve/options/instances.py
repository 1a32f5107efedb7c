"""Options of instances: their number, kind and timeouts."""

from __future__ import annotations

import argparse
from pathlib import Path

from banaserve.config import SCHEDULERS, ServeConfig

_DEFAULTS = ServeConfig()


def add_instances(parser: argparse.ArgumentParser) -> None:
    """Add these options to ``parser``."""
    add = parser.add_argument
    add("--model", help="smollm2-135m, llama-13b, opt-13b, a Hugging Face id or a folder")
    add("--pd", metavar="P:D", help="prefill and decode instances (1:1)")
    add("--colocated", type=int, default=0, metavar="N", help="number of instances that do both")
    add(
        "--instances",
        type=int,
        default=0,
        metavar="N",
        help="number of instances that begin as both; what each does is left to the elastic policy",
    )
    add(
        "--elastic",
        action="store_true",
        help="let roles and step sizes follow the load: --orchestrator on with the policy elastic",
    )
    add(
        "--scale-max",
        type=int,
        default=_DEFAULTS.scale_max,
        metavar="N",
        help="let the orchestrator add instances under load, to N in all (0: it adds none)",
    )
    add(
        "--scale-min",
        type=int,
        default=_DEFAULTS.scale_min,
        metavar="N",
        help="with --scale-max: remove idle ones, down to N in all (1)",
    )
    add("--devices", default="", help="CUDA devices of each instance, such as '0;1;2,3;4,5'")
    for role in ("prefill", "decode"):
        add(
            f"--{role}-tensor-parallel-size",
            type=int,
            default=0,
            metavar="N",
            help=f"tensor-parallel ranks of an engine for {role} (as --tensor-parallel-size)",
        )
    add(
        "--engine-start",
        default=_DEFAULTS.engine_start,
        metavar="WAY",
        help="way to start an engine: fork, for CPUs; spawn, for GPUs; auto, which of both fits",
    )
    add(
        "--threads-per-instance",
        type=int,
        default=_DEFAULTS.threads_per_instance,
        metavar="N",
        help="CPU threads of each engine (0: share the cores)",
    )
    add(
        "--scheduler",
        choices=SCHEDULERS,
        default=_DEFAULTS.scheduler,
        help="order of waiting requests in an engine: vLLM's, or Preble's by the cached fraction",
    )
    add(
        "--start-timeout",
        type=float,
        default=_DEFAULTS.start_timeout_s,
        metavar="SECONDS",
        help="time that an engine may take to start",
    )
    add(
        "--restart-grace",
        type=float,
        default=_DEFAULTS.restart_grace_s,
        metavar="SECONDS",
        help="time that a request waits for a restart where no instance serves",
    )
    add(
        "--engine-stall-timeout",
        type=float,
        default=_DEFAULTS.engine_stall_s,
        metavar="SECONDS",
        help="silence after which an engine on a CPU that uses no processor is started again",
    )
    add(
        "--engine-spin-timeout",
        type=float,
        default=_DEFAULTS.engine_spin_s,
        metavar="SECONDS",
        help="silence after which any engine is started again: more than its longest step",
    )
    add("--run-dir", type=Path, help="folder of logs (a new one below the state directory)")
    add(
        "--log-max-size",
        default=_DEFAULTS.log_max_size,
        metavar="SIZE",
        help="size at which a log is begun anew, the last one being kept; '' sets no limit",
    )
    add("--config", type=Path, help="TOML file with these options; the command line wins")
