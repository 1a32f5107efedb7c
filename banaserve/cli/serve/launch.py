"""Part of ``banaserve serve`` that imports vLLM and is therefore imported late."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
import os
import platform
import secrets
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from banaserve.base import models
from banaserve.base.config import (
    GUEST_STALL_ON_CPU_S,
    GUEST_STALL_ON_GPU_S,
    MINIATURE,
    ServeConfig,
)
from banaserve.base.errors import MigrationError, UserError
from banaserve.base.models import ResolvedModel, cache
from banaserve.base.platform.cpu_features import DtypeChoice, choose_dtype, read_cpu_flags
from banaserve.base.platform.linux import available_memory_bytes, limit_heaps
from banaserve.base.run_dir import RunDir
from banaserve.base.types import Role
from banaserve.cli.serve import emulation, needs
from banaserve.cli.serve.compiling import CompileChoice, choose_compiling, find_compiler
from banaserve.cli.serve.gpu_words import GpuUse, gpu_words, installed
from banaserve.cli.serve.sockets import check_tls
from banaserve.frontdoor.lifecycle.listening_socket import FrontSocket
from banaserve.kvstore.sizes import format_size, parse_size
from banaserve.nodes.server.options import NodeOptions

if TYPE_CHECKING:
    from banaserve.engine.compat.config import VllmConfig
    from banaserve.mains.serve import Parts
    from banaserve.nodes.server.launcher import NodesLauncher
    from banaserve.nodes.server.pool import NodeWork
    from banaserve.serving.launch.devices import Devices
    from banaserve.serving.launch.engine_settings import EngineSettings, RoleEngine
    from banaserve.serving.launch.launcher import ForkLauncher

logger = logging.getLogger(__name__)
_GARBAGE_AFTER = 3_000
"""Number of objects after which the front door's process collects garbage, instead of Python's 700:
with 512 streams collections took a twelfth of its time. 20,000 gain as much and take 13% more
memory."""
_HEAPS = 2
"""Number of malloc's heaps in the front door's process, whose threads are many and short-lived:
each restart of an engine would leave 45 MB in another heap."""
_EAGER = ("--enforce-eager", "--no-enforce-eager")
_TOOL_OPTIONS = (
    "--enable-auto-tool-choice",
    "--no-enable-auto-tool-choice",
    "--tool-call-parser",
)
_PARALLEL = ("--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp")


@contextlib.contextmanager
def prepared(
    config: ServeConfig, model: ResolvedModel, front: FrontSocket, run: RunDir
) -> Iterator[Parts]:
    """Prepare everything that must precede the event loop and any thread; yield the parts.

    Raises:
        UserError: vLLM refuses its options or the model, or there is too little memory.
    """
    available_bytes = available_memory_bytes()
    threads = config.threads_per_instance or max(1, (os.cpu_count() or 1) // config.num_instances)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    # torch's default is a folder of a known name in the temporary folder, which all may write.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache.cache_root() / "torchinductor"))
    from banaserve.contracts.environment import set_environment
    from banaserve.engine import engine_args
    from banaserve.engine.compat.config import is_on_cpu
    from banaserve.mains.serve import Parts, scheme_of
    from banaserve.serving.launch.budgets import Budgets
    from banaserve.serving.launch.launcher import Launcher, SpawnLauncher

    set_environment()
    store_socket = str(run.sockets / "kv")
    argv, args, engine_config = _for_vllm(config, model, store_socket, run.logs)
    if engine_args.pools(engine_config) and (config.kv_store or not config.colocated):
        try:
            config = config.without_legs()
        except UserError as refused:
            raise UserError(
                f"{model.served_name} pools, so its instances have no store and hand nothing "
                f"over: {refused}"
            ) from refused
        argv, args, engine_config = _for_vllm(config, model, store_socket, run.logs)
    check_tls(args.ssl_certfile, args.ssl_keyfile, args.ssl_ca_certs, args.ssl_ciphers)
    front.check_scheme(scheme_of(args))
    engine_args.load_parsers(args)
    if config.scheduler == "preble":
        from banaserve.engine.compat.scheduler import check_first_come

        check_first_come(engine_config)
    on_cpu = is_on_cpu()
    nodes = NodeOptions.of(config)
    Budgets.of(config, engine_config)  # raises if the budgets are not possible
    if config.kv_store:
        from banaserve.engine.connector.block_hash import check_model, check_parallel

        check_parallel(engine_config.parallel_config)
        check_model(engine_config.model_config)
    by_role = _by_role(config, model, store_socket, run.logs)
    _check_degrees(engine_config, by_role)
    if config.migration:
        from banaserve.migration.modules.attention_backend import attention_blocker

        device_type = "cpu" if on_cpu else "cuda"
        if blocker := attention_blocker(config.migration_attention, device_type):
            raise UserError(blocker)
    if config.must_migrate and (blocker := _migration_blocker(engine_config)):
        raise UserError(f"--migration on: {blocker}; without it nothing moves and the rest works")
    emulation.begin(config, engine_config.parallel_config.world_size, on_cpu, run.logs)
    instance_bytes = 0
    if on_cpu:
        instance_bytes = _instance_bytes(model, engine_config)
        if not nodes.are_used:
            needs.check_memory(config, instance_bytes, available_bytes)
    forks = config.engine_start == "fork" or (config.engine_start == "auto" and on_cpu)
    if nodes.are_used:
        num_gpus = 0 if on_cpu else engine_config.parallel_config.world_size
        work = _node_work(config, argv, num_gpus, instance_bytes, forks=forks)
        launcher: Launcher = _nodes_launcher(nodes, work, run)
    elif forks:
        launcher = _fork_launcher(argv, engine_config)
    else:
        devices = _devices(config, _num_ranks(config, engine_config, by_role), on_cpu)
        launcher = SpawnLauncher(argv, devices)
    try:
        make = SettingsMaker(config, model, engine_config, store_socket, run.logs)
        yield Parts(
            config,
            engine_config,
            args,
            launcher,
            front,
            run,
            store_socket,
            make,
            instance_bytes,
            emulation.words(config),
            str(engine_config.model_config.served_model_name),
            by_role,
        )
    finally:
        launcher.close()


def _for_vllm(
    config: ServeConfig, model: ResolvedModel, store_socket: str, logs: Path
) -> tuple[list[str], Namespace, VllmConfig]:
    """Return vLLM's options, the parsed options, and the configuration of options and model.

    Sets the environment in which engines capture CUDA graphs that let modules move.

    Raises:
        UserError: vLLM refuses the options, or banaserve does not support one.
    """
    from banaserve.contracts.environment import GRAPHS_VARIABLE
    from banaserve.engine import engine_args
    from banaserve.engine.cuda_graphs import choose_graphs

    argv = _vllm_argv(config, model, store_socket, logs)
    args = engine_args.parse_vllm_argv(argv)
    engine_args.refuse_taken(args, config, model.path_or_id)
    if not (config.migration and choose_graphs(args)):
        return argv, args, engine_args.engine_config(args)
    os.environ[GRAPHS_VARIABLE] = "1"
    engine_config = engine_args.engine_config(args)
    if _migration_blocker(engine_config):
        del os.environ[GRAPHS_VARIABLE]  # the model is compiled: nothing can move anyway
        args = engine_args.parse_vllm_argv(argv)
        engine_config = engine_args.engine_config(args)
    return argv, args, engine_config


def _fork_launcher(argv: list[str], engine_config: VllmConfig) -> ForkLauncher:
    """Return a launcher that forks engines; fork its first parent now, before any thread."""
    from banaserve.mains.engine_parent import fork_engine_parent, pre_import
    from banaserve.serving.launch.launcher import ForkLauncher
    from banaserve.serving.launch.parent_link import ParentLink, start_parent

    pre_import()
    pid, control = fork_engine_parent(engine_config)
    return ForkLauncher(ParentLink(control, pid), lambda: start_parent(argv))


def _node_work(
    config: ServeConfig, argv: list[str], num_gpus: int, instance_bytes: int, *, forks: bool
) -> NodeWork:
    """Return what this server requires of the nodes that its engines are to run on."""
    from banaserve.kvstore.daemon.options import StoreOptions
    from banaserve.nodes.server.assignment import InstanceNeed
    from banaserve.nodes.server.pool import NodeWork

    store = StoreOptions.of(config) if config.kv_store else None
    node_bytes = parse_size(store.size) if store is not None else 0
    return NodeWork(
        instances=config.instances(),
        need=InstanceNeed(num_gpus, 0 if num_gpus else instance_bytes, node_bytes),
        vllm_argv=tuple(argv),
        forks=forks,
        threads=config.threads_per_instance,
        store=store,
    )


def _nodes_launcher(options: NodeOptions, work: NodeWork, run: RunDir) -> NodesLauncher:
    from banaserve.nodes.by_ray.places import RayPlaces
    from banaserve.nodes.places import GivenPlaces, Places
    from banaserve.nodes.server.launcher import NodesLauncher

    server, key = f"{os.uname().nodename}:{run.logs}", options.key
    places: Places = GivenPlaces(options.addresses)
    if options.ray:
        key = key or secrets.token_hex(32)  # Ray passes it to the agents
        name = run.logs.name
        log = run.logs / "ray.log"
        places = RayPlaces(options.ray, key, name, work.instances, work.need, log)
    return NodesLauncher(places, key, work, server)


@dataclass(frozen=True)
class SettingsMaker:
    """Maker of engines' settings for a running server, as ``prepared`` makes the first ones.

    Attributes:
        model: Model that the server was started with.
        engine_config: Configuration of the engines at the start, which the front door uses.
    """

    config: ServeConfig
    model: ResolvedModel
    engine_config: VllmConfig
    store_socket: str
    logs: Path

    def __call__(
        self, current: EngineSettings, model_name: str, options: Sequence[str]
    ) -> EngineSettings:
        """Return the settings after ``current``; ``current`` if no setting and no file has changed.

        Raises:
            UserError: No engine could serve with the new settings.
        """
        from banaserve.engine import engine_args
        from banaserve.serving.launch.budgets import Budgets
        from banaserve.serving.launch.engine_settings import EngineSettings, weights_of
        from banaserve.serving.restart.options import check_fits, check_options

        check_options(options)
        if not (model_name or options) and weights_of(current.config) == current.weights:
            return current
        name, added = model_name or current.model, (*current.options, *options)
        model = self._resolved(name)
        config = replace(self.config, vllm_argv=(*self.config.vllm_argv, *added))
        argv = _vllm_argv(config, model, self.store_socket, self.logs)
        args = engine_args.parse_vllm_argv(argv)
        engine_args.refuse_taken(args, config, model.path_or_id)
        made = engine_args.engine_config(args)
        known = current.config.model_config.max_model_len
        max_model_len = min(known, self.engine_config.model_config.max_model_len)
        check_fits(self.engine_config, made, max_model_len, config.kv_store)
        self._check_memory(current.config, made)
        budgets, weights = Budgets.of(config, made), weights_of(made)
        by_role = _by_role(config, model, self.store_socket, self.logs)
        number = current.number + 1
        return EngineSettings(made, budgets, weights, tuple(argv), name, added, number, by_role)

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


def dtype_words(parts: Parts) -> str:
    """Return the banner's text on the engines' number type; empty on GPUs: the model sets it."""
    from banaserve.engine.compat.config import is_on_cpu

    if not is_on_cpu():
        return ""
    name = str(parts.engine_config.model_config.dtype).removeprefix("torch.")
    if _gives(parts.config.vllm_argv, "--dtype"):
        return str(DtypeChoice(name, "given by --dtype"))
    if parts.config.model == MINIATURE:
        return str(DtypeChoice(name, "what miniatures compute in"))
    return str(_cpu_dtype())


def model_words(parts: Parts) -> str:
    """Return the banner's text on how engines run the model; for GPUs see also ``gpu_line``."""
    from banaserve.engine.compat.config import is_on_cpu
    from banaserve.engine.engine_args import goes_without_rotary_kernel, pools

    kept = ""
    if pools(parts.engine_config):
        kept = "it pools, so each instance does all of a request, without the store"
    elif parts.config.kv_store and parts.engine_config.model_config.is_hybrid:
        kept = "its states lie in the store, so vLLM's own prefix cache is off"
    if not is_on_cpu():
        return kept
    if _gives(parts.config.vllm_argv, *_EAGER):
        is_eager = parts.engine_config.model_config.enforce_eager
        words = str(CompileChoice(not is_eager, "given by --[no-]enforce-eager"))
    else:
        words = str(_compiling(parts.config))
    if goes_without_rotary_kernel(parts.engine_config):
        words += "; MLA without vLLM's rotary kernel, which is wrong on CPUs"
    return f"{words}; {kept}" if kept else words


def give_tool_parser(parts: Parts) -> str:
    """Give vLLM's server the parser of tool calls that the model needs, unless the user gave one.

    Returns:
        Text of the banner; empty for a model without tools, and for a parser given by the user.
    """
    from banaserve.engine.tool_parsers import choose_tool_parser

    if pools(parts) or _gives(parts.config.vllm_argv, *_TOOL_OPTIONS):
        return ""
    choice = choose_tool_parser(parts.args, parts.engine_config)
    parts.args.enable_auto_tool_choice = bool(choice.name)
    parts.args.tool_call_parser = choice.name or None
    return str(choice)


def pools(parts: Parts) -> bool:
    """Return whether the model answers with embeddings or scores instead of text."""
    from banaserve.engine import engine_args

    return engine_args.pools(parts.engine_config)


def migration_words(parts: Parts) -> str:
    """Return the banner's text on moves; empty if moves are possible, or migration is off."""
    blocker = _migration_blocker(parts.engine_config) if parts.config.migration else ""
    return f"nothing can move: {blocker}" if blocker else ""


def gpu_line(parts: Parts) -> str:
    """Return the banner's text on what is on and off on GPUs; empty on a CPU."""
    from banaserve.engine.compat.config import is_on_cpu
    from banaserve.engine.cuda_graphs import graph_words

    if is_on_cpu():
        return ""
    engine_config = parts.engine_config
    off = "--migration is off" if not parts.config.migration else ""
    use = GpuUse(
        blocker=off or _migration_blocker(engine_config),
        graphs=graph_words(engine_config),
        num_ranks=engine_config.parallel_config.tensor_parallel_size,
        crosses=NodeOptions.of(parts.config).are_used,
        transport=parts.config.migration_transport,
        attention=parts.config.migration_attention,
    )
    return gpu_words(use, installed())


def _migration_blocker(engine_config: VllmConfig) -> str:
    """Return why engines cannot migrate, as far as their configuration shows; empty if they can."""
    from banaserve.migration.checks import check_config

    try:
        check_config(engine_config)
    except MigrationError as blocker:
        return str(blocker)
    return ""


def run(parts: Parts, say: Callable[[str], None], on_open: Callable[[str], None]) -> None:
    import uvloop

    from banaserve.mains.serve import serve

    gc.set_threshold(_GARBAGE_AFTER)
    limit_heaps(_HEAPS)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(parts, say, on_open))


def _vllm_argv(
    config: ServeConfig, model: ResolvedModel, store_socket: str, logs: Path
) -> list[str]:
    """Return vLLM's options: ours first, so that the user's options override them."""
    from banaserve.engine import engine_args
    from banaserve.engine.compat.config import is_on_cpu

    argv = ["--model", model.path_or_id, "--host", config.host, "--port", str(config.port)]
    if not _gives(config.vllm_argv, "--served-model-name"):
        argv += ["--served-model-name", model.served_name]
    if is_on_cpu():
        if not _gives(config.vllm_argv, *_EAGER) and not _compiling(config).is_compiled:
            argv.append("--enforce-eager")
        if not _gives(config.vllm_argv, "--dtype"):
            argv += ["--dtype", _cpu_dtype().name]
        if not _gives(config.vllm_argv, "--kv-cache-memory-bytes", "--gpu-memory-utilization"):
            argv += ["--kv-cache-memory-bytes", str(needs.CPU_KV_BYTES)]
        if not _gives(config.vllm_argv, *_PARALLEL, "--distributed-executor-backend"):
            argv += ["--distributed-executor-backend", "uni"]  # one process an engine, not two
    argv += engine_args.common_options()
    if config.scheduler == "preble":
        if _gives(config.vllm_argv, "--scheduler-cls"):
            raise UserError("--scheduler preble and --scheduler-cls exclude each other")
        argv += engine_args.preble_options()
    argv += emulation.vllm_options(config, logs)
    if config.kv_store:
        argv += engine_args.store_options(
            store_socket, config.kv_store_salt, cost_gate=config.kv_store_fetch == "cheaper"
        )
    argv += config.vllm_argv
    if config.migration:
        from banaserve.engine import migration_settings as migration_config

        usual_stall_s = GUEST_STALL_ON_CPU_S if is_on_cpu() else GUEST_STALL_ON_GPU_S
        argv += migration_config.migration_options(
            migration_config.MigrationSettings(
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


def _by_role(
    config: ServeConfig, model: ResolvedModel, store_socket: str, logs: Path
) -> dict[Role, RoleEngine]:
    """Return the engines of each role that has its own tensor-parallel degree."""
    from banaserve.engine import engine_args
    from banaserve.serving.launch.engine_settings import RoleEngine

    found = {}
    for role, degree in config.tensor_parallel_by_role.items():
        words = (*config.vllm_argv, "--tensor-parallel-size", str(degree))
        own = replace(config, vllm_argv=words)
        argv = _vllm_argv(own, model, store_socket, logs)
        made = engine_args.engine_config(engine_args.parse_vllm_argv(argv))
        found[role] = RoleEngine(made, tuple(argv))
    return found


def _check_degrees(engine_config: VllmConfig, by_role: Mapping[Role, RoleEngine]) -> None:
    """Check that engines of all degrees write blocks that the others can read.

    Raises:
        UserError: Engines of one degree could not read blocks of another.
    """
    from banaserve.engine.connector.block_hash import check_degrees

    parallel = [one.config.parallel_config for one in by_role.values()]
    degrees = {one.tensor_parallel_size for one in parallel}
    if len(by_role) < len((Role.PREFILL, Role.DECODE)):
        degrees.add(engine_config.parallel_config.tensor_parallel_size)
    check_degrees(engine_config.model_config, degrees)


def _num_ranks(
    config: ServeConfig, engine_config: VllmConfig, by_role: Mapping[Role, RoleEngine]
) -> list[int]:
    """Return the number of ranks of each instance, in the order of ``config.instances()``."""
    made = {role: one.config for role, one in by_role.items()}
    every = [made.get(role, engine_config) for _, role in config.instances()]
    return [one.parallel_config.world_size for one in every]


def _compiling(config: ServeConfig) -> CompileChoice:
    return choose_compiling(config, find_compiler())


def _cpu_dtype() -> DtypeChoice:
    return choose_dtype(platform.machine(), read_cpu_flags())


def _gives(argv: tuple[str, ...], *names: str) -> bool:
    spelt = {word.split("=")[0].replace("_", "-") for word in argv if word.startswith("-")}
    return bool(spelt & set(names))


def _instance_bytes(model: ResolvedModel, engine_config: VllmConfig) -> int:
    """Return the memory that one instance takes on a CPU."""
    cache_config = engine_config.cache_config
    weight_bytes = models.weight_bytes(model.name, Path(model.path_or_id))
    kv_bytes = cache_config.kv_cache_memory_bytes
    return needs.instance_bytes(weight_bytes, kv_bytes, cache_config.gpu_memory_utilization)


def _devices(config: ServeConfig, num_ranks: Sequence[int], on_cpu: bool) -> Devices:
    """Return the CUDA devices of each instance: as given, or in order, one for each rank."""
    from banaserve.serving.launch.devices import Devices, check_groups

    ids = [str(instance_id) for instance_id, _ in config.instances()]
    if on_cpu:
        return Devices({})
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    if config.devices:
        check_groups(config.devices, num_ranks)
        return Devices(dict(zip(ids, config.devices, strict=True)), names, max(num_ranks))
    if len(names) < sum(num_ranks):
        sizes = " or ".join(str(one) for one in sorted(set(num_ranks)))
        raise UserError(
            f"{len(ids)} instances of {sizes} GPUs need {sum(num_ranks)}; this "
            f"machine shows {len(names)}: fewer instances (--pd), a smaller "
            "--tensor-parallel-size, or share them with --devices '0;0'"
        )
    left = iter(names)
    groups = [list(itertools.islice(left, number)) for number in num_ranks]
    given = dict(zip(ids, (",".join(group) for group in groups), strict=True))
    return Devices(given, names, max(num_ranks))
