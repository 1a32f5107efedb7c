"""Remote parts of a paced engine, in the layers and heads of the modelled model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from banaserve.costs import modules as costs
from banaserve.costs.profile import Profile
from banaserve.engine.vllm.migration.types import ModelGeometry
from banaserve.engine.vllm.migration.units.base import MigrationUnit
from banaserve.types import Module

ATTENTION_FRACTION = 0.3
"""Share of a layer's time that its heads take along: what the simulator assumes."""


def modelled(profile: Profile, own: ModelGeometry, modules: MigrationUnit) -> list[Module]:
    """The modules of the modelled model that an engine's ``modules`` stand for.

    Args:
        own: Of the model that really runs.
    """
    shape = profile.shape
    return modules.modelled(own, ModelGeometry(shape.num_layers, shape.num_kv_heads))


@dataclass(frozen=True, slots=True)
class RemoteShare:
    """What modules elsewhere do to each step of their host.

    Attributes:
        hop_s: What messages add to a step, whatever its size.
        hop_token_s: And for each of its tokens.
        shares: Of the step's own time, by the instance whose device it takes.
        elsewhere: What of it are ranges of layers, for each such device: with them a step in parts
            computes at once.
        max_microbatches: That a step is cut into; 1: the host waits.
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
        """Of ``placed``: what is away, each with the instance that it runs beside."""
        hop_s = hop_token_s = 0.0
        shares: dict[str, float] = {}
        elsewhere: dict[str, float] = {}
        for modules, target in placed:
            for module in modelled(profile, own, modules):
                first_s = costs.hop_s(profile, module, 0)
                hop_s += first_s
                hop_token_s += costs.hop_s(profile, module, 1) - first_s
                share = costs.share(profile, module, ATTENTION_FRACTION)
                shares[target] = shares.get(target, 0.0) + share
                if not module.heads:
                    elsewhere[target] = elsewhere.get(target, 0.0) + share
        each = tuple(elsewhere.values())
        return cls(hop_s, hop_token_s, tuple(shares.items()), each, max_microbatches)
