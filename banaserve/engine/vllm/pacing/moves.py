"""Migrations of a paced engine take the time of the profile's link (BanaServe Eqs. 3, 4 and 11)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from banaserve.engine.vllm.migration.block_mover import BlockMover
from banaserve.engine.vllm.migration.host import MigrationHost
from banaserve.engine.vllm.migration.modules import LayerRange, ModelShape
from banaserve.engine.vllm.migration.move import Move
from banaserve.engine.vllm.migration.unit_builder import UnitBuilder
from banaserve.engine.vllm.migration.units import Residence, Unit
from banaserve.engine.vllm.pacing.away import modelled
from banaserve.engine.vllm.pacing.pacer import Pacer


def install(pacer: Pacer, shape: ModelShape, token_bytes: int) -> None:
    """Hold back what moves and copies in this process.

    Args:
        shape: Of the model that really runs.
        token_bytes: K and V of one of its tokens in all layers.
    """
    # A byte that is really copied stands for so many of the modelled model.
    _pace_copies(pacer, pacer.profile.shape.token_bytes / token_bytes)
    _pace_builds(pacer, shape)
    _pace_commits(pacer)


def _pace_copies(pacer: Pacer, kv_scale: float) -> None:
    copy = BlockMover.copy

    @functools.wraps(copy)
    def paced_copy(mover: BlockMover, *args: Any, **kwargs: Any) -> int:
        began_s = pacer.now_s()
        num_bytes = copy(mover, *args, **kwargs)
        copied_s = pacer.now_s()
        pacer.hold(began_s, pacer.profile.between.transfer_s(num_bytes * kv_scale))
        mover.seconds += pacer.now_s() - copied_s
        return num_bytes

    _replace(BlockMover, "copy", paced_copy)


def _pace_builds(pacer: Pacer, shape: ModelShape) -> None:
    build, profile = UnitBuilder.build, pacer.profile

    @functools.wraps(build)
    def paced_build(builder: UnitBuilder, unit: Unit, *args: Any, **kwargs: Any) -> Residence:
        began_s = pacer.now_s()
        residence: Residence = build(builder, unit, *args, **kwargs)
        if isinstance(unit.modules, LayerRange):
            (module,) = modelled(profile, shape, unit.modules)
            num_bytes = module.num_layers * profile.shape.layer_weight_bytes
            pacer.hold(began_s, profile.between.transfer_s(num_bytes))
        return residence

    _replace(UnitBuilder, "build", paced_build)


def _pace_commits(pacer: Pacer) -> None:
    commit = MigrationHost.commit

    @functools.wraps(commit)
    def paced_commit(host: MigrationHost, *args: Any, **kwargs: Any) -> Move:
        move = commit(host, *args, **kwargs)
        swapped_s = pacer.now_s()
        pacer.hold(swapped_s, pacer.profile.between.sync_s)
        held_s = pacer.now_s() - swapped_s
        move.facts["swap_s"] += held_s
        move.facts["stall_s"] += held_s
        pacer.woke()  # the engine has stood still until now
        return move

    _replace(MigrationHost, "commit", paced_commit)


def _replace(kind: type[Any], name: str, method: Callable[..., Any]) -> None:
    setattr(kind, name, method)
