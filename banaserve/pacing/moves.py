"""Migrations of a paced engine, timed by the profile's link (BanaServe Eqs. 3, 4 and 11)."""

from __future__ import annotations

from banaserve.contracts.move_phase import ModelGeometry
from banaserve.migration.host.time_hook import TimeHook
from banaserve.migration.units.base import MigrationUnit
from banaserve.pacing.pacer import Pacer
from banaserve.pacing.placement_cost import modelled


class PacedMoves(TimeHook):
    """Hook that delays each piece of a migration until the modelled hardware would have done it.

    Args:
        shape: Shape of the model that really runs.
        token_bytes: Bytes of K and V of one token in all layers of that model.
    """

    def __init__(self, pacer: Pacer, shape: ModelGeometry, token_bytes: int) -> None:
        self._pacer = pacer
        self._shape = shape
        # Bytes of the modelled model for each byte that is really copied.
        self._kv_scale = pacer.profile.model.token_bytes / token_bytes

    def copied(self, num_bytes: int, took_s: float) -> None:
        self._hold(took_s, num_bytes * self._kv_scale)

    def built(self, modules: MigrationUnit, took_s: float) -> None:
        if modules.has_weights:
            profile = self._pacer.profile
            (module,) = modelled(profile, self._shape, modules)
            self._hold(took_s, module.num_layers * profile.model.layer_weight_bytes)

    def committed(self) -> None:
        pacer = self._pacer
        pacer.hold(pacer.now_s(), pacer.profile.link.sync_s)
        pacer.woke()  # the engine was stalled until now

    def _hold(self, took_s: float, modelled_bytes: float) -> None:
        pacer = self._pacer
        pacer.hold(pacer.now_s() - took_s, pacer.profile.link.transfer_s(modelled_bytes))
