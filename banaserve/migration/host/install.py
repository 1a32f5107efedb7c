"""Installation of live migration in an engine's process, before the engine is created."""

from __future__ import annotations

import logging
from typing import Any, cast

from banaserve.base.errors import MigrationError
from banaserve.contracts.rpc.engine_api import CoreApi, PoolResize, PoolStatus
from banaserve.contracts.rpc.typed_rpc import implements
from banaserve.engine.compat.config import VllmConfig
from banaserve.engine.compat.engine import EngineCore, add_utility
from banaserve.engine.compat.kv_connector import get_kv_transfer_group
from banaserve.engine.compat.runner import hooks as runner_hooks
from banaserve.engine.compat.runner import model as compat
from banaserve.engine.connector.worker_side.block_copy import BlockCopier
from banaserve.engine.migration_settings import MigrationSettings, settings_of
from banaserve.migration import checks
from banaserve.migration.host.host import MigrationHost
from banaserve.migration.host.recovery import AsyncPoolScheduler, PoolScheduler
from banaserve.migration.host.time_hook import REAL_TIME, TimeHook
from banaserve.migration.kv.host_kv import HostKv
from banaserve.migration.kv.store_copier import StoreCopier, store_worker
from banaserve.migration.modules.attention_backend import kernels_for
from banaserve.migration.modules.paged_attention import take_kernels
from banaserve.migration.ranks import Ranks
from banaserve.migration.rpc.messages import StorePlace

logger = logging.getLogger(__name__)


def install(config: VllmConfig, runner_class: type[Any], time_hook: TimeHook = REAL_TIME) -> bool:
    """Prepare this process for the engine that ``config`` describes.

    The methods of the engine that create its KV cache are wrapped, because no other hook runs
    before the store's connector learns the place of the cache.

    Returns:
        True if the engine can migrate; False also if it was not asked to.
    """
    if not install_worker(config, runner_class, time_hook):
        return False
    scheduler = config.scheduler_config
    scheduler.scheduler_cls = AsyncPoolScheduler if scheduler.async_scheduling else PoolScheduler
    install_utilities()
    return True


def install_worker(
    config: VllmConfig, runner_class: type[Any], time_hook: TimeHook = REAL_TIME
) -> bool:
    """Prepare a process that runs only a worker of the engine: a part of ``install``."""
    if settings_of(config) is None:
        return False
    if str(config.device_config.device_type) != "cpu":
        try:
            checks.check_config(config)
        except MigrationError as reason:
            # vLLM's own classes stay, and calls are refused with the reason.
            logger.warning("%s", reason)
            runner_hooks.set_host(runner_class, str(reason))
            return False
    install_runner(runner_class, time_hook)
    return True


def install_utilities() -> None:
    """Let engine cores of this process report and change the size of their pools."""
    add_utility(CoreApi.banaserve_pool_info.__name__, _pool_info)
    add_utility(CoreApi.banaserve_resize_pool.__name__, _resize_pool)


@implements(CoreApi.banaserve_pool_info)
def _pool_info(core: EngineCore) -> PoolStatus:
    return _pool(core).pool_info()


@implements(CoreApi.banaserve_resize_pool)
def _resize_pool(core: EngineCore, num_blocks: int, hold: bool = False) -> PoolResize:
    return _pool(core).resize_pool(num_blocks, hold)


def _pool(core: EngineCore) -> PoolScheduler:
    return cast(PoolScheduler, core.scheduler)


def install_runner(runner_class: type[Any], time_hook: TimeHook = REAL_TIME) -> None:
    """Wrap the creation of the KV cache by runners of this class, for engines that can migrate."""
    if runner_hooks.host_of(runner_class) is not None:
        return
    runner_hooks.set_host(runner_class, "")

    def make_tensors(make: runner_hooks.Call, runner: Any, *args: Any, **kwargs: Any) -> Any:
        kv_caches = make(runner, *args, **kwargs)
        settings = settings_of(runner.vllm_config)
        if settings is None:
            return kv_caches
        return _become_host(runner, settings, kv_caches, time_hook)

    def make_cache(make: runner_hooks.Call, runner: Any, *args: Any, **kwargs: Any) -> Any:
        made = make(runner, *args, **kwargs)
        _join_store(runner)
        return made

    runner_hooks.wrap_kv_cache_tensors(runner_class, make_tensors)
    runner_hooks.wrap_kv_cache(runner_class, make_cache)


def _become_host(
    runner: Any, settings: MigrationSettings, kv_caches: dict[str, Any], time_hook: TimeHook
) -> dict[str, Any]:
    """Give each layer's KV a slab of its own, and watch all steps of the runner."""
    context = runner.vllm_config.compilation_config.static_forward_context
    try:
        checks.check_config(runner.vllm_config)
        checks.check_groups(runner.kv_cache_config.kv_cache_groups)
        layout, num_blocks = runner.cache_config.kv_cache_layout, runner.kv_cache_config.num_blocks
        checks.check_tensors(kv_caches, str(layout), num_blocks)
        device = next(iter(kv_caches.values())).device
        kernels = kernels_for(settings.attention, device)
        take_kernels(kernels, context, kv_caches)
    except MigrationError as reason:
        logger.warning("%s", reason)
        runner_hooks.set_host(runner, str(reason))
        return kv_caches
    host_kv = HostKv(kv_caches, settings.kv_growth, kernels)
    runner_hooks.replace_kv_caches(runner, host_kv.tensors)
    ranks = Ranks(compat.ranks_group())
    runner_hooks.set_host(runner, MigrationHost(runner, settings, host_kv, time_hook, ranks))
    return host_kv.tensors


def _join_store(runner: Any) -> None:
    """Direct the store's copies to the guests that layers have moved to."""
    host = runner_hooks.host_of(runner)
    worker = store_worker()
    if not isinstance(host, MigrationHost) or worker is None:
        return

    def wrap(inner: BlockCopier) -> BlockCopier:
        return StoreCopier(
            inner,
            list(host.kv.tensors),
            host.kv,
            host.step_context.dirty_blocks,
            host.placement.where_is,
            host.placement.older_blocks,
            worker.part,
            lambda lost: worker.abandon_step(),
        )

    worker.wrap_copier(wrap)
    if host.settings.guest_saves and runner.device.type == "cpu" and host.ranks.is_alone:
        connector = get_kv_transfer_group()
        host.engine.store = StorePlace(
            connector.socket, connector.client_name, connector.fingerprint
        )
