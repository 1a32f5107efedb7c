"""Groups of a model's KV cache: attention's blocks of tokens, and states of its other layers.

Mamba and linear attention keep one state of a sequence, which each token changes. vLLM gives it a
block of the same pool and as large as a block of tokens, so the store copies both alike: what
differs is when a state may be saved (see ``states.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from banaserve.engine.vllm.compat import kv_cache as compat
from banaserve.engine.vllm.compat.kv_cache import FullAttentionSpec, KVCacheConfig
from banaserve.errors import UserError

_STATES_ALONE = "none"
"""vLLM's way of keeping states in which a sequence has one block a group, its newest."""


@dataclass(frozen=True, slots=True)
class CacheGroups:
    """Where a sequence's blocks are among those that vLLM lists by group.

    Attributes:
        attention: Index of the group whose blocks hold tokens.
        states: Indices of those that hold a state each.
        num_rows: Layers of the largest group: a block is a page in each of so many rows.
    """

    attention: int = 0
    states: tuple[int, ...] = ()
    num_rows: int = 1

    @classmethod
    def of(cls, config: KVCacheConfig) -> CacheGroups:
        """Read from a KV cache that has been laid out.

        Raises:
            UserError: It has other groups than one of alike attention layers and those of states.
        """
        groups = config.kv_cache_groups
        states = [i for i, one in enumerate(groups) if _is_state(one.kv_cache_spec)]
        others = [i for i in range(len(groups)) if i not in states]
        specs = [one.kv_cache_spec for one in groups]
        is_plain = len(others) == 1 and isinstance(specs[others[0]], FullAttentionSpec)
        if not is_plain or len({spec.page_size_bytes for spec in specs}) > 1:
            raise UserError(
                "this model mixes kinds of attention, which the KV cache store does not share yet; "
                "serve it without the store: --colocated N --no-kv-store"
            )
        return cls(others[0], tuple(states), max(len(one.layer_names) for one in groups))

    def with_states(self, block_ids: Sequence[Sequence[int]], first: int, end: int) -> list[int]:
        """A request's blocks of tokens from ``first`` to ``end``, and then those of its states.

        Args:
            block_ids: Of each group.
        """
        return [*block_ids[self.attention][first:end], *self.states_of(block_ids)]

    def states_of(self, block_ids: Sequence[Sequence[int]]) -> list[int]:
        """The blocks that hold a request's states, one of each group that has them."""
        return [block_ids[group][0] for group in self.states]


def _is_state(spec: object) -> bool:
    if not isinstance(spec, compat.MambaSpec):
        return False
    if spec.mamba_cache_mode != _STATES_ALONE or spec.num_speculative_blocks:
        raise UserError(
            "the KV cache store keeps states of sequences by itself: leave vLLM's "
            "--mamba-cache-mode, --enable-prefix-caching and --speculative-config out"
        )
    return True


def describe_states(groups: CacheGroups, config: KVCacheConfig) -> str:
    """What decides the bytes of a sequence's states, for fingerprints; empty without states."""
    specs = [config.kv_cache_groups[group].kv_cache_spec for group in groups.states]
    return "; ".join(f"{spec.mamba_type} {spec.shapes} {spec.dtypes}" for spec in specs)


def pages(
    config: KVCacheConfig, kv_caches: Mapping[str, torch.Tensor | Sequence[torch.Tensor]]
) -> list[torch.Tensor]:
    """The memory of a KV cache that layers of several groups share, row by row.

    Args:
        kv_caches: What vLLM gives each layer: one tensor, or those of a state.

    Returns:
        For each row uint8 ``[num_blocks, page_bytes]``, a block one run of bytes.

    Raises:
        UserError: Groups do not lie one over the other in that way.
    """
    page_bytes = config.kv_cache_groups[0].kv_cache_spec.page_size_bytes
    rows: dict[int, torch.Tensor] = {}
    for placed in config.kv_cache_tensors:
        for number, name in enumerate(placed.layers):
            cache = kv_caches[name]
            tensor = cache if isinstance(cache, torch.Tensor) else cache[0]
            storage = tensor.untyped_storage()
            offset = placed.offset + number * placed.layer_stride
            end = offset + (config.num_blocks - 1) * placed.block_stride + page_bytes
            begins_there = tensor.data_ptr() == storage.data_ptr() + offset
            if not begins_there or end > storage.nbytes() or placed.block_stride < page_bytes:
                raise UserError(
                    f"the KV cache of {name} does not lie as the store goes by: serve it without "
                    "the store: --colocated N --no-kv-store"
                )
            shape, strides = (config.num_blocks, page_bytes), (placed.block_stride, 1)
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            rows[offset] = whole.set_(storage, offset, shape, strides)
    return [rows[offset] for offset in sorted(rows)]
