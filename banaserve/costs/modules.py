"""Costs and relief of modules that run beside another instance, in a profile's time."""

from __future__ import annotations

from banaserve.costs.profile import Profile
from banaserve.orchestrator.migration import slabs
from banaserve.orchestrator.model import moving
from banaserve.types import Module


def share(profile: Profile, module: Module, attention_fraction: float) -> float:
    """Share of a step's time that ``module`` takes, in [0, 1].

    Args:
        attention_fraction: Share of a layer's time that its heads take along when they move.
    """
    facts = profile.facts
    of_all = slabs.num_slabs(facts, module) / (facts.num_layers * facts.num_kv_heads)
    return of_all * attention_fraction if module.heads else of_all


def hop_s(profile: Profile, module: Module, tokens: int) -> float:
    """Seconds that messages to remote ``module`` and back add to a step of ``tokens`` tokens."""
    shape, link = profile.shape, profile.between
    if not module.heads:
        return moving.layers_step_s(tokens, shape.hidden_size, shape.element_bytes, link)
    return moving.heads_step_s(
        tokens,
        module.num_layers,
        len(module.heads),
        shape.head_dim,
        shape.element_bytes,
        link,
        shape.num_heads // shape.num_kv_heads,
    )
