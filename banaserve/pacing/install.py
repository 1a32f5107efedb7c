"""Installation of pacing in an engine's process, before its engine is made."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from banaserve.contracts.move_phase import ModelGeometry
from banaserve.engine.compat import engine as compat
from banaserve.engine.compat.config import VllmConfig, element_bytes
from banaserve.engine.compat.kv_connector import get_kv_transfer_group
from banaserve.engine.compat.runner import hooks as runner_hooks
from banaserve.engine.connector.metadata import StepPlan
from banaserve.engine.connector.scheduler_side.scheduler import scheduled, work_of
from banaserve.migration.host.host import MigrationHost
from banaserve.migration.host.time_hook import REAL_TIME, TimeHook
from banaserve.migration.units.base import MigrationUnit
from banaserve.orchestrator.control.costs import profile as profiles
from banaserve.orchestrator.control.costs.transfers import Copied
from banaserve.pacing.config import settings_of
from banaserve.pacing.moves import PacedMoves
from banaserve.pacing.pacer import Pacer
from banaserve.pacing.placement_cost import RemoteShare


def install(config: VllmConfig, runner_class: type[Any], instance: str) -> TimeHook:
    """Pace the engine that ``config`` describes, the only one of this process.

    Args:
        instance: Id of the instance.

    Returns:
        Hook that paces the engine's migrations; without pacing they take their real time.

    Raises:
        UserError: The settings or the profile cannot be used.
    """
    settings = settings_of(config)
    if settings is None:
        return REAL_TIME
    profile = profiles.load(settings.devices.get(instance, settings.profile))
    pacer = Pacer(profile, instance, Path(settings.folder), settings.dilation)
    model, parallel = config.model_config, config.parallel_config
    shape = ModelGeometry(model.get_num_layers(parallel), model.get_num_kv_heads(parallel))
    compat.on_wake(pacer.woke)
    _install_runner(runner_class, PacedSteps(pacer, shape))
    return PacedMoves(pacer, shape, _token_bytes(config, shape))


def _token_bytes(config: VllmConfig, shape: ModelGeometry) -> int:
    model = config.model_config
    head_bytes = model.get_head_size() * element_bytes(model)
    return shape.num_layers * 2 * shape.num_kv_heads * head_bytes


class PacedSteps:
    """Steps of a model runner, whose work and copies are passed on to the pacer."""

    def __init__(self, pacer: Pacer, shape: ModelGeometry) -> None:
        self._pacer = pacer
        self._shape = shape
        self._seen = 1, 1

    def begin(self, runner: Any, output: Any) -> None:
        """Note that the runner begins a step, or has nothing to run."""
        plan = output.kv_connector_metadata
        worker = get_kv_transfer_group().worker if isinstance(plan, StepPlan) else None
        work = work_of([(before, num) for _, before, num in scheduled(output)])
        if work is None:
            self._pacer.woke()
            times = None
        else:
            self._look_away(runner_hooks.host_of(runner))
            times = self._pacer.begin(work, self._copied(runner, plan))
        if worker is not None:
            worker.modelled = times

    def end(self) -> None:
        self._pacer.end()

    def _copied(self, runner: Any, plan: Any) -> Copied:
        if not isinstance(plan, StepPlan):
            return Copied()
        block_tokens = runner.cache_config.block_size
        return Copied(
            len(plan.loads) * block_tokens,
            len(plan.early_loads) * block_tokens,
            len(plan.saves) * block_tokens,
        )

    def _look_away(self, host: Any) -> None:
        if not isinstance(host, MigrationHost):
            return
        seen = host.epoch, host.placement.overlap.parts_allowed
        if seen != self._seen:
            self._seen = seen
            profile, placed = self._pacer.profile, _placed(host)
            self._pacer.away = RemoteShare.of(
                profile, self._shape, placed, max_microbatches=seen[1]
            )


def _placed(host: MigrationHost) -> Iterator[tuple[MigrationUnit, str]]:
    for unit in host.placement:
        if unit.residence is not None:
            # A guest's id ends with the instance that it runs beside.
            yield unit.modules, unit.residence.link.guest_id.rpartition("-")[2]


def _install_runner(runner_class: type[Any], steps: PacedSteps) -> None:
    def execute_model(
        run: runner_hooks.Call, runner: Any, output: Any, *args: Any, **kwargs: Any
    ) -> Any:
        steps.begin(runner, output)
        result = run(runner, output, *args, **kwargs)
        if result is not None:
            steps.end()
        return result

    def sample_tokens(sample: runner_hooks.Call, runner: Any, *args: Any, **kwargs: Any) -> Any:
        result = sample(runner, *args, **kwargs)
        steps.end()
        return result

    runner_hooks.wrap_execute_model(runner_class, execute_model)
    runner_hooks.wrap_sample_tokens(runner_class, sample_tokens)
