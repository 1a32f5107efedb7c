"""Migrations of a paced engine, in the time of the profile's link (BanaServe Eqs. 3, 4 and 11)."""

from __future__ import annotations

from banaserve.engine.vllm.emulation.pacer import Pacer
from banaserve.engine.vllm.emulation.placement_cost import modelled
from banaserve.engine.vllm.migration.time_hook import TimeHook
from banaserve.engine.vllm.migration.types import ModelGeometry
from banaserve.engine.vllm.migration.units.base import MigrationUnit


class PacedMoves(TimeHook):
    """Holds each piece of a migration back until the modelled hardware would have done it.

    Args:
        shape: Of the model that really runs.
        token_bytes: K and V of one of its tokens in all layers.
    """

    def __init__(self, pacer: Pacer, shape: ModelGeometry, token_bytes: int) -> None:
        self._pacer = pacer
        self._shape = shape
        # A byte that is really copied stands for so many of the modelled model.
        self._kv_scale = pacer.profile.shape.token_bytes / token_bytes

    def copied(self, num_bytes: int, took_s: float) -> None:
        self._hold(took_s, num_bytes * self._kv_scale)

    def built(self, modules: MigrationUnit, took_s: float) -> None:
        if modules.has_weights:
            profile = self._pacer.profile
            (module,) = modelled(profile, self._shape, modules)
            self._hold(took_s, module.num_layers * profile.shape.layer_weight_bytes)

    def committed(self) -> None:
        pacer = self._pacer
        pacer.hold(pacer.now_s(), pacer.profile.between.sync_s)
        pacer.woke()  # the engine has stood still until now

    def _hold(self, took_s: float, modelled_bytes: float) -> None:
        pacer = self._pacer
        pacer.hold(pacer.now_s() - took_s, pacer.profile.between.transfer_s(modelled_bytes))
