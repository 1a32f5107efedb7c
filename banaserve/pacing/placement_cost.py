"""Cost of a paced engine's remote modules, in the layers and heads of the modelled model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from banaserve.base.types import Module
from banaserve.contracts.move_phase import ModelGeometry
from banaserve.migration.units.base import MigrationUnit
from banaserve.orchestrator.control.costs import modules as costs
from banaserve.orchestrator.control.costs.profile import Profile
from banaserve.orchestrator.control.projection import slabs

ATTENTION_FRACTION = 0.3
"""Share of a layer's time that moves with its heads, as the simulator assumes it."""


def modelled(profile: Profile, own: ModelGeometry, modules: MigrationUnit) -> list[Module]:
    """Return the modules of the modelled model that an engine's ``modules`` stand for.

    Args:
        own: Shape of the model that really runs.
    """
    shape = profile.model
    return modules.modelled(own, ModelGeometry(shape.num_layers, shape.num_kv_heads))


@dataclass(frozen=True, slots=True)
class RemoteShare:
    """Effect of modules that run elsewhere on each step of their host.

    Attributes:
        hop_s: Seconds that messages add to a step of any size.
        hop_token_s: Seconds that messages add for each token of the step.
        shares: Pairs of an instance and the share of the step's own time spent on its device.
        elsewhere: Shares of the step's own time that are ranges of layers, for each such device;
            a step in parts computes these concurrently.
        max_microbatches: Maximum number of parts of a step; 1: the host waits for its guests.
    """

    hop_s: float = 0.0
    hop_token_s: float = 0.0
    shares: tuple[tuple[str, float], ...] = ()
    elsewhere: tuple[float, ...] = ()
    max_microbatches: int = 1

    @classmethod
    def of(
        cls,
        profile: Profile,
        own: ModelGeometry,
        placed: Iterable[tuple[MigrationUnit, str]],
        max_microbatches: int = 1,
    ) -> RemoteShare:
        """Compute the effect of units that are away.

        Args:
            own: Shape of the model that really runs.
            placed: Units that are away, each with the instance that it runs beside.
        """
        hop_s = hop_token_s = 0.0
        shares: dict[str, float] = {}
        elsewhere: dict[str, float] = {}
        for modules, target in placed:
            for module in modelled(profile, own, modules):
                first_s = costs.hop_s(profile, module, 0)
                hop_s += first_s
                hop_token_s += costs.hop_s(profile, module, 1) - first_s
                share = slabs.compute_share(profile.facts, module, ATTENTION_FRACTION)
                shares[target] = shares.get(target, 0.0) + share
                if not module.heads:
                    elsewhere[target] = elsewhere.get(target, 0.0) + share
        each = tuple(elsewhere.values())
        return cls(hop_s, hop_token_s, tuple(shares.items()), each, max_microbatches)
