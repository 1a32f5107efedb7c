"""vLLM's options and configuration of a server's engines, at its start and after restarts.

Imports vLLM: import this module only after the environment is set.
"""

from __future__ import annotations

import logging
import os
import platform
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from banaserve.base import models
from banaserve.base.config.serve_config import (
    GUEST_STALL_ON_CPU_S,
    GUEST_STALL_ON_GPU_S,
    ServeConfig,
)
from banaserve.base.errors import MigrationError, UserError
from banaserve.base.models import ResolvedModel
from banaserve.base.platform.cpu_features import DtypeChoice, choose_dtype, read_cpu_flags
from banaserve.base.platform.linux import available_memory_bytes
from banaserve.base.platform.run_dir import RunDir
from banaserve.base.types import Role
from banaserve.cli.serve import emulation, machine
from banaserve.cli.serve.machine import CompileChoice, choose_compiling, find_compiler
from banaserve.contracts.environment import GRAPHS_VARIABLE
from banaserve.engine import engine_args
from banaserve.engine.compat.config import VllmConfig, is_on_cpu
from banaserve.engine.connector.block_hash import check_degrees
from banaserve.engine.cuda_graphs import choose_graphs
from banaserve.engine.migration_settings import MigrationSettings, migration_options
from banaserve.kvstore.sizes import format_size
from banaserve.migration.checks import check_config
from banaserve.serving.launch.engine_settings import Budgets, EngineSettings, RoleEngine, weights_of
from banaserve.serving.operations.restart_options import check_fits, check_options

logger = logging.getLogger(__name__)
EAGER = ("--enforce-eager", "--no-enforce-eager")
PARALLEL = ("--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp")


def vllm_argv(config: ServeConfig, model: ResolvedModel, run: RunDir) -> list[str]:
    """Return vLLM's options: ours first, so that the user's options override them.

    Raises:
        UserError: Options exclude each other, or vLLM refuses one.
    """
    given = config.vllm_argv
    argv = ["--model", model.path_or_id, "--host", config.host, "--port", str(config.port)]
    if not gives(given, "--served-model-name"):
        argv += ["--served-model-name", model.served_name]
    if is_on_cpu():
        if not gives(given, *EAGER) and not compile_choice(config).is_compiled:
            argv.append("--enforce-eager")
        if not gives(given, "--dtype"):
            argv += ["--dtype", cpu_dtype().name]
        if not gives(given, "--kv-cache-memory-bytes", "--gpu-memory-utilization"):
            argv += ["--kv-cache-memory-bytes", str(machine.CPU_KV_BYTES)]
        if not gives(given, *PARALLEL, "--distributed-executor-backend"):
            argv += ["--distributed-executor-backend", "uni"]  # one process an engine, not two
    argv += engine_args.common_options()
    if config.scheduler == "preble":
        if gives(given, "--scheduler-cls"):
            raise UserError("--scheduler preble and --scheduler-cls exclude each other")
        argv += engine_args.preble_options()
    argv += emulation.vllm_options(config, run.logs)
    if config.kv_store:
        argv += engine_args.store_options(
            str(run.store_socket),
            config.kv_store_salt,
            cost_gate=config.kv_store_fetch == "cheaper",
        )
    argv += given
    if config.migration:
        usual_stall_s = GUEST_STALL_ON_CPU_S if is_on_cpu() else GUEST_STALL_ON_GPU_S
        argv += migration_options(
            MigrationSettings(
                kv_growth=config.migration_kv_growth,
                stall_s=config.migration_stall_s or usual_stall_s,
                overlap=config.migration_overlap,
                guest_saves=config.migration_guest_saves,
                poison=config.migration_poison,
                attention=config.migration_attention,
            ),
            engine_args.parse_vllm_argv(argv).additional_config,
        )
    return argv


def for_vllm(
    config: ServeConfig, model: ResolvedModel, run: RunDir
) -> tuple[list[str], Namespace, VllmConfig]:
    """Return vLLM's options, the parsed options, and the configuration of options and model.

    Sets the environment in which engines capture CUDA graphs that let modules move.

    Raises:
        UserError: vLLM refuses the options, or banaserve does not support one.
    """
    argv = vllm_argv(config, model, run)
    args = engine_args.parse_vllm_argv(argv)
    engine_args.refuse_taken(args, config, model.path_or_id)
    if not (config.migration and choose_graphs(args)):
        return argv, args, engine_args.engine_config(args)
    os.environ[GRAPHS_VARIABLE] = "1"
    engine_config = engine_args.engine_config(args)
    if migration_blocker(engine_config):
        del os.environ[GRAPHS_VARIABLE]  # the model is compiled: nothing can move anyway
        args = engine_args.parse_vllm_argv(argv)
        engine_config = engine_args.engine_config(args)
    return argv, args, engine_config


def engines_by_role(
    config: ServeConfig, model: ResolvedModel, run: RunDir
) -> dict[Role, RoleEngine]:
    """Return the engines of each role that has its own tensor-parallel degree."""
    found = {}
    for role, degree in config.tensor_parallel_by_role.items():
        words = (*config.vllm_argv, "--tensor-parallel-size", str(degree))
        argv = vllm_argv(replace(config, vllm_argv=words), model, run)
        made = engine_args.engine_config(engine_args.parse_vllm_argv(argv))
        found[role] = RoleEngine(made, tuple(argv))
    return found


def check_role_degrees(engine_config: VllmConfig, by_role: Mapping[Role, RoleEngine]) -> None:
    """Check that engines of all degrees write blocks that the others can read.

    Raises:
        UserError: Engines of one degree could not read blocks of another.
    """
    parallel = [one.config.parallel_config for one in by_role.values()]
    degrees = {one.tensor_parallel_size for one in parallel}
    if len(by_role) < len((Role.PREFILL, Role.DECODE)):
        degrees.add(engine_config.parallel_config.tensor_parallel_size)
    check_degrees(engine_config.model_config, degrees)


def migration_blocker(engine_config: VllmConfig) -> str:
    """Return why engines cannot migrate, as far as their configuration shows; empty if they can."""
    try:
        check_config(engine_config)
    except MigrationError as blocker:
        return str(blocker)
    return ""


def compile_choice(config: ServeConfig) -> CompileChoice:
    """Return whether engines on this machine's processor compile the model."""
    return choose_compiling(config, find_compiler())


def cpu_dtype() -> DtypeChoice:
    """Return the number type of engines on this machine's processor."""
    return choose_dtype(platform.machine(), read_cpu_flags())


def gives(argv: tuple[str, ...], *names: str) -> bool:
    """Return whether vLLM's options ``argv`` give one of ``names``."""
    spelt = {word.split("=")[0].replace("_", "-") for word in argv if word.startswith("-")}
    return bool(spelt & set(names))


@dataclass(frozen=True)
class SettingsMaker:
    """Maker of engines' settings for rolling restarts, as those of the server's start were made.

    Attributes:
        model: Model that the server was started with.
        engine_config: Configuration of the engines at the start, which the front door uses.
    """

    config: ServeConfig
    model: ResolvedModel
    engine_config: VllmConfig
    run: RunDir

    def __call__(
        self, current: EngineSettings, model_name: str, options: Sequence[str]
    ) -> EngineSettings:
        """Return the settings after ``current``; ``current`` if no setting and no file has changed.

        Raises:
            UserError: No engine could serve with the new settings.
        """
        check_options(options)
        if not (model_name or options) and weights_of(current.config) == current.weights:
            return current
        name, added = model_name or current.model, (*current.options, *options)
        model = self._resolved(name)
        config = replace(self.config, vllm_argv=(*self.config.vllm_argv, *added))
        argv = vllm_argv(config, model, self.run)
        args = engine_args.parse_vllm_argv(argv)
        engine_args.refuse_taken(args, config, model.path_or_id)
        made = engine_args.engine_config(args)
        known = current.config.model_config.max_model_len
        max_model_len = min(known, self.engine_config.model_config.max_model_len)
        check_fits(self.engine_config, made, max_model_len, config.kv_store)
        self._check_memory(current.config, made)
        return EngineSettings(
            made,
            Budgets.of(config, made),
            weights_of(made),
            tuple(argv),
            name,
            added,
            current.number + 1,
            engines_by_role(config, model, self.run),
        )

    def _resolved(self, name: str) -> ResolvedModel:
        if not name:
            return self.model
        if self.config.pace:
            raise UserError("--model: with --pace engines run a miniature, whose weights stay")
        found = models.resolve(name, None, logger.info)
        return replace(found, served_name=self.model.served_name)

    def _check_memory(self, before: VllmConfig, after: VllmConfig) -> None:
        """Check the growth of all engines: each engine ends before its replacement starts.

        Raises:
            UserError: All engines together would grow by more than the available memory.
        """
        had, wants = (one.cache_config.kv_cache_memory_bytes or 0 for one in (before, after))
        grows, available = self.config.num_instances * (wants - had), available_memory_bytes()
        if had and grows > available:
            raise UserError(
                f"--kv-cache-memory-bytes {wants}: all engines together would take "
                f"{format_size(grows)} more, and {format_size(available)} are available"
            )
