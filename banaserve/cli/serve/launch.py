"""Preparation of a server, before its event loop begins, and its run.

Imports vLLM: import this module only after the environment is set.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import secrets
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
import uvloop

from banaserve.base import models
from banaserve.base.config.serve_config import ServeConfig
from banaserve.base.errors import UserError
from banaserve.base.models import ResolvedModel
from banaserve.base.platform.linux import limit_heaps
from banaserve.base.platform.run_dir import RunDir
from banaserve.base.types import Role
from banaserve.cli.serve import emulation, machine
from banaserve.cli.serve.engine_options import (
    SettingsMaker,
    check_role_degrees,
    engines_by_role,
    for_vllm,
    migration_blocker,
)
from banaserve.engine import engine_args
from banaserve.engine.compat.config import VllmConfig, is_on_cpu
from banaserve.engine.compat.scheduler import check_first_come
from banaserve.engine.connector.block_hash import check_model, check_parallel
from banaserve.frontdoor.app import tls_of
from banaserve.frontdoor.lifecycle.listening_socket import FrontSocket
from banaserve.kvstore.daemon.options import StoreOptions
from banaserve.kvstore.sizes import parse_size
from banaserve.mains.serve import Parts, scheme_of, serve
from banaserve.migration.modules.attention_backend import attention_blocker
from banaserve.serving.launch.devices import Devices, check_groups, check_memory
from banaserve.serving.launch.engine_settings import Budgets, RoleEngine
from banaserve.serving.launch.launcher import ForkLauncher, Launcher, SpawnLauncher
from banaserve.serving.launch.parent_link import ParentLink, start_parent

_GARBAGE_AFTER = 3_000
"""Number of objects after which the front door's process collects garbage, instead of Python's 700:
with 512 streams collections took a twelfth of its time. 20,000 gain as much and take 13% more
memory."""
_HEAPS = 2
"""Number of malloc's heaps in the front door's process, whose threads are many and short-lived:
each restart of an engine would leave 45 MB in another heap."""


@contextlib.contextmanager
def prepared(
    config: ServeConfig,
    model: ResolvedModel,
    front: FrontSocket,
    run: RunDir,
    available_bytes: int,
) -> Iterator[Parts]:
    """Prepare everything that must precede the event loop and any thread; yield the parts.

    Args:
        available_bytes: Memory that was available before vLLM was imported.

    Raises:
        UserError: vLLM refuses its options or the model, or there is too little memory.
    """
    argv, args, engine_config = for_vllm(config, model, run)
    if engine_args.pools(engine_config) and (config.kv_store or not config.colocated):
        try:
            config = config.without_legs()
        except UserError as refused:
            raise UserError(
                f"{model.served_name} pools, so its instances have no store and hand nothing "
                f"over: {refused}"
            ) from refused
        argv, args, engine_config = for_vllm(config, model, run)
    check_tls(args)
    front.check_scheme(scheme_of(args))
    engine_args.load_parsers(args)
    if config.scheduler == "preble":
        check_first_come(engine_config)
    Budgets.of(config, engine_config)  # raises if the budgets are not possible
    if config.kv_store:
        check_parallel(engine_config.parallel_config)
        check_model(engine_config.model_config)
    by_role = engines_by_role(config, model, run)
    check_role_degrees(engine_config, by_role)
    _check_migration(config, engine_config)
    emulation.begin(config, engine_config.parallel_config.world_size, is_on_cpu(), run.logs)
    instance_bytes = 0
    if is_on_cpu():
        instance_bytes = _instance_bytes(model, engine_config)
        if not config.has_nodes:
            machine.check_memory(config, instance_bytes, available_bytes)
    make = SettingsMaker(config, model, engine_config, run)
    time = emulation.words(config)
    launcher = _launcher(config, engine_config, argv, by_role, instance_bytes, run)
    try:
        yield Parts(
            config, engine_config, args, launcher, front, run, make, instance_bytes, time, by_role
        )
    finally:
        launcher.close()


def check_tls(args: Namespace) -> None:
    """Check that the files and suites can serve TLS, if any are given.

    Raises:
        UserError: TLS cannot be served with them.
    """
    if (tls := tls_of(args)) is not None:
        try:
            tls.context()
        except UserError as error:
            raise UserError(f"--ssl-certfile: {error}") from None
    elif args.ssl_keyfile:
        raise UserError(
            f"--ssl-keyfile {args.ssl_keyfile}: give its certificate too, in --ssl-certfile"
        )


def _check_migration(config: ServeConfig, engine_config: VllmConfig) -> None:
    """Check that attention and model allow migration, where the options ask for these.

    Raises:
        UserError: The options ask for what is not possible.
    """
    if config.migration:
        device_type = "cpu" if is_on_cpu() else "cuda"
        if blocker := attention_blocker(config.migration_attention, device_type):
            raise UserError(blocker)
    if config.must_migrate and (blocker := migration_blocker(engine_config)):
        raise UserError(f"--migration on: {blocker}; without it nothing moves and the rest works")


def _launcher(
    config: ServeConfig,
    engine_config: VllmConfig,
    argv: list[str],
    by_role: Mapping[Role, RoleEngine],
    instance_bytes: int,
    run: RunDir,
) -> Launcher:
    forks = config.engine_start == "fork" or (config.engine_start == "auto" and is_on_cpu())
    if config.has_nodes:
        num_gpus = 0 if is_on_cpu() else engine_config.parallel_config.world_size
        return _nodes_launcher(config, argv, num_gpus, instance_bytes, run, forks=forks)
    if forks:
        return _fork_launcher(argv, engine_config)
    cache = engine_config.cache_config
    num_ranks = _num_ranks(config, engine_config, by_role)
    devices = _devices(config, num_ranks, cache.gpu_memory_utilization)
    return SpawnLauncher(argv, devices, in_turn=not cache.kv_cache_memory_bytes)


def _fork_launcher(argv: list[str], engine_config: VllmConfig) -> ForkLauncher:
    """Return a launcher that forks engines; fork its first parent now, before any thread."""
    from banaserve.mains.engine_parent import fork_engine_parent, pre_import

    pre_import()
    pid, control = fork_engine_parent(engine_config)
    return ForkLauncher(ParentLink(control, pid), lambda: start_parent(argv))


def _nodes_launcher(
    config: ServeConfig,
    argv: list[str],
    num_gpus: int,
    instance_bytes: int,
    run: RunDir,
    *,
    forks: bool,
) -> Launcher:
    """Return a launcher on the nodes, with what this server requires of them."""
    from banaserve.nodes.by_ray.places import RayPlaces
    from banaserve.nodes.places import GivenPlaces, Places
    from banaserve.nodes.server.assignment import InstanceNeed
    from banaserve.nodes.server.launcher import NodesLauncher
    from banaserve.nodes.server.pool import NodeWork

    store = StoreOptions.of(config) if config.kv_store else None
    node_bytes = parse_size(store.size) if store is not None else 0
    work = NodeWork(
        instances=config.instances(),
        need=InstanceNeed(num_gpus, 0 if num_gpus else instance_bytes, node_bytes),
        vllm_argv=tuple(argv),
        forks=forks,
        threads=config.threads_per_instance,
        store=store,
    )
    key = config.cluster_key
    places: Places = GivenPlaces(config.nodes)
    if config.cluster:
        key = key or secrets.token_hex(32)  # Ray passes it to the agents
        log = run.logs / "ray.log"
        places = RayPlaces(config.cluster, key, run.logs.name, work.instances, work.need, log)
    return NodesLauncher(places, key, work, f"{os.uname().nodename}:{run.logs}")


def _num_ranks(
    config: ServeConfig, engine_config: VllmConfig, by_role: Mapping[Role, RoleEngine]
) -> list[int]:
    """Return the number of ranks of each instance, in the order of ``config.instances()``."""
    made = {role: one.config for role, one in by_role.items()}
    every = [made.get(role, engine_config) for _, role in config.instances()]
    return [one.parallel_config.world_size for one in every]


def _devices(config: ServeConfig, num_ranks: Sequence[int], memory_fraction: float) -> Devices:
    """Return the CUDA devices of each instance: as given, or in order, one for each rank."""
    if is_on_cpu():
        return Devices({})
    ids = [str(instance_id) for instance_id, _ in config.instances()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    if config.devices:
        check_groups(config.devices, num_ranks)
        check_memory(config.devices, memory_fraction)
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


def _instance_bytes(model: ResolvedModel, engine_config: VllmConfig) -> int:
    """Return the memory that one instance takes on a CPU."""
    cache_config = engine_config.cache_config
    weight_bytes = models.weight_bytes(model.name, Path(model.path_or_id))
    kv_bytes = cache_config.kv_cache_memory_bytes
    return machine.instance_bytes(weight_bytes, kv_bytes, cache_config.gpu_memory_utilization)


def run_server(parts: Parts, say: Callable[[str], None], on_open: Callable[[str], None]) -> None:
    """Run the server until it ends; see ``mains.serve.serve``."""
    gc.set_threshold(_GARBAGE_AFTER)
    limit_heaps(_HEAPS)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(parts, say, on_open))
