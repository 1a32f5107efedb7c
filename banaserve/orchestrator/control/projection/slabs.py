"""Number of KV blocks that fit once modules are away.

The KV of one layer and one KV head has a slab of its own, which grows and shrinks by granules. A
block needs its part of every slab at home, so that bytes freed by one slab are useful only once
they have made every other slab longer by a block.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from banaserve.base.types import InstanceFacts, Module


def slab_block_bytes(facts: InstanceFacts) -> int:
    """Return the bytes of one block in one slab."""
    return facts.layer_token_bytes * facts.block_tokens // facts.num_kv_heads


def num_slabs(facts: InstanceFacts, module: Module) -> int:
    """Return the number of slabs of ``module``."""
    # ``num_layers`` is written out for speed: called several times for each candidate of a plan.
    return (module.end_layer - module.first_layer) * (len(module.heads) or facts.num_kv_heads)


def share(facts: InstanceFacts, module: Module) -> float:
    """Return the share of the model's slabs that ``module`` has, in [0, 1]."""
    return num_slabs(facts, module) / (facts.num_layers * facts.num_kv_heads)


def compute_share(facts: InstanceFacts, module: Module, attention_fraction: float) -> float:
    """Return the share of a step's time that ``module`` takes, in [0, 1].

    Args:
        attention_fraction: Share of a layer's time that moves with its heads.
    """
    of_all = share(facts, module)
    return of_all * attention_fraction if module.heads else of_all


def num_movable(facts: InstanceFacts, heads: bool) -> int:
    """Return the number of KV heads of an instance, or that of its layers."""
    return facts.num_kv_heads if heads else facts.num_layers


def free(facts: InstanceFacts, taken: Iterable[Module], size: int, heads: bool) -> Module | None:
    """Return the last ``size`` KV heads, or layers, that could move: see the two functions."""
    return free_heads(facts, taken, size) if heads else free_layers(facts, taken, size)


class Home(NamedTuple):
    """Part of an instance that is at home: the inputs of ``blocks`` that placements determine.

    Attributes:
        layers: Number of whole layers at home.
    """

    layers: int
    slabs: int

    @classmethod
    def of(cls, facts: InstanceFacts, away: Iterable[Module]) -> Home:
        layers, slabs = facts.num_layers, facts.num_layers * facts.num_kv_heads
        for module in away:
            slabs -= num_slabs(facts, module)
            if not module.heads:
                layers -= module.num_layers
        return cls(layers, slabs)

    def moved(self, facts: InstanceFacts, module: Module, is_back: bool) -> Home:
        """Return what is at home after ``module`` has left, or come back."""
        sign = 1 if is_back else -1
        layers = 0 if module.heads else module.num_layers
        return Home(self.layers + sign * layers, self.slabs + sign * num_slabs(facts, module))

    def blocks(self, facts: InstanceFacts, guest_bytes: int) -> int:
        """Return how many KV blocks fit besides guests, weights and immovable memory."""
        pool_bytes = facts.kv_bytes
        if not pool_bytes:
            pool_bytes = facts.memory_bytes - facts.fixed_bytes - guest_bytes
            pool_bytes -= self.layers * facts.layer_weight_bytes
        if self.slabs <= 0 or pool_bytes <= 0:
            return 0
        granule = facts.granule_bytes
        fitting = pool_bytes // self.slabs // granule * granule // slab_block_bytes(facts)
        return min(fitting, facts.max_kv_blocks) if facts.max_kv_blocks else fitting


def blocks(facts: InstanceFacts, away: Iterable[Module], guest_bytes: int) -> int:
    """Return how many KV blocks fit while the modules of ``away`` are away; none may overlap."""
    return Home.of(facts, away).blocks(facts, guest_bytes)


def guest_bytes(
    facts: InstanceFacts, module: Module, num_blocks: int, weights_are_shared: bool
) -> int:
    """Return the bytes of ``module`` at its guest: slabs for all blocks of the host, and weights.

    Args:
        num_blocks: Number of KV blocks of the host.
        weights_are_shared: True if the guest reads the weights of its own instance.
    """
    granule = facts.granule_bytes
    slab_bytes = -(-num_blocks * slab_block_bytes(facts) // granule) * granule
    return num_slabs(facts, module) * slab_bytes + _weights(facts, module, weights_are_shared)


def moved_bytes(
    facts: InstanceFacts, module: Module, used_blocks: float, weights_are_shared: bool
) -> int:
    """Return the bytes to transfer: the KV in use, and weights (BanaServe Eqs. 3 and 11)."""
    kv_bytes = round(used_blocks * num_slabs(facts, module) * slab_block_bytes(facts))
    return kv_bytes + _weights(facts, module, weights_are_shared)


def _weights(facts: InstanceFacts, module: Module, are_shared: bool) -> int:
    if module.heads or are_shared:
        return 0
    return module.num_layers * facts.layer_weight_bytes


def free_layers(facts: InstanceFacts, taken: Iterable[Module], num_layers: int) -> Module | None:
    """Return the last ``num_layers`` contiguous layers without any ``taken`` module, or None."""
    gone = tuple(taken)
    first = facts.num_layers - num_layers
    while first >= 0:
        module = Module(first, first + num_layers)
        clash = [other for other in gone if other.overlaps(module)]
        if not clash:
            return module
        first = min(other.first_layer for other in clash) - num_layers
    return None


def free_heads(facts: InstanceFacts, taken: Iterable[Module], num_heads: int) -> Module | None:
    """Return the last ``num_heads`` KV heads that are at home in all home layers, or None.

    The layers are the last contiguous range in which no whole layer is away.
    """
    gone = tuple(taken)
    whole = [module for module in gone if not module.heads]
    end = facts.num_layers
    while blocking := [m for m in whole if m.first_layer < end <= m.end_layer]:
        end = min(m.first_layer for m in blocking)
    first = max((m.end_layer for m in whole if m.end_layer <= end), default=0)
    if end - first < 1:
        return None
    away = {head for m in gone for head in m.heads if m.first_layer < end and first < m.end_layer}
    home = [head for head in range(facts.num_kv_heads) if head not in away]
    if len(home) < num_heads:
        return None
    return Module(first, end, tuple(home[-num_heads:]))
