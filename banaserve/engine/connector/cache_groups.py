"""Groups of a model's KV cache: attention's blocks of tokens, and states of its other layers.

Mamba and linear attention keep one state per sequence, which each token changes. vLLM gives the
state a block of the same pool, as large as a block of tokens, so the store copies both in the same
way; only the time at which a state may be saved differs. A state cannot be rolled back, so a
request can continue a prefix only where a state was saved: at ends of blocks at which a step of the
engine ended, and at the end of a prompt that is handed over.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from banaserve.base.errors import UserError
from banaserve.engine.compat import kv_cache as compat
from banaserve.engine.compat.kv_cache import FullAttentionSpec, KVCacheConfig

_DIGEST_BYTES = 32
_STATES_ALONE = "none"
"""vLLM's mode of keeping states in which a sequence has one block per group: the newest state."""


@dataclass(frozen=True, slots=True)
class CacheGroups:
    """Indices of the groups in which vLLM lists a sequence's blocks.

    Attributes:
        attention: Index of the group whose blocks hold tokens.
        states: Indices of the groups whose blocks hold a state each.
        num_rows: Number of layers of the largest group; a block is one page in each row.
    """

    attention: int = 0
    states: tuple[int, ...] = ()
    num_rows: int = 1

    @classmethod
    def of(cls, config: KVCacheConfig) -> CacheGroups:
        """Read the groups of a KV cache that has been laid out.

        Raises:
            UserError: The cache has groups other than one of uniform attention layers and those of
                states, or a token's KV depends on more than the tokens before it.
        """
        groups = config.kv_cache_groups
        states = [i for i, one in enumerate(groups) if _is_state(one.kv_cache_spec)]
        others = [i for i in range(len(groups)) if i not in states]
        specs = [one.kv_cache_spec for one in groups]
        is_plain = len(others) == 1 and _is_causal(specs[others[0]])
        if not is_plain or len({spec.page_size_bytes for spec in specs}) > 1:
            raise UserError(
                "this model mixes kinds of attention, or a token's KV depends on more than the "
                "tokens before it, which the KV cache store does not share yet; serve it without "
                "the store: --colocated N --no-kv-store"
            )
        return cls(others[0], tuple(states), max(len(one.layer_names) for one in groups))

    def with_states(self, block_ids: Sequence[Sequence[int]], first: int, end: int) -> list[int]:
        """Return a request's blocks of tokens from ``first`` to ``end``, then those of its states.

        Args:
            block_ids: Block ids of the request in each group.
        """
        return [*block_ids[self.attention][first:end], *self.states_of(block_ids)]

    def states_of(self, block_ids: Sequence[Sequence[int]]) -> list[int]:
        """Return the blocks that hold a request's states, one of each group with states."""
        return [block_ids[group][0] for group in self.states]


def _is_causal(spec: object) -> bool:
    """Return whether blocks of this attention depend only on the tokens up to their end.

    In a prefix LM a token attends to later ones of its prompt. With R-SWA a window limits which
    tokens of the output it attends to, but none of a prompt with the same tokens.
    """
    if not isinstance(spec, FullAttentionSpec) or isinstance(spec, compat.RSWASpec):
        return False
    return not spec.non_causal


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
    """Describe all that affects the bytes of states, for fingerprints; empty without states."""
    specs: list[Any] = [config.kv_cache_groups[group].kv_cache_spec for group in groups.states]
    return "; ".join(f"{spec.mamba_type} {spec.shapes} {spec.dtypes}" for spec in specs)


def pages(
    config: KVCacheConfig, kv_caches: Mapping[str, torch.Tensor | Sequence[torch.Tensor]]
) -> list[torch.Tensor]:
    """Return the memory of a KV cache that layers of several groups share, row by row.

    Args:
        kv_caches: Tensor that vLLM gives each layer, or the tensors of its state.

    Returns:
        For each row a tensor uint8 ``[num_blocks, page_bytes]``; a block is one run of bytes.

    Raises:
        UserError: The groups do not share the memory in that way.
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


def state_keys(prefix: bytes, num_groups: int) -> list[bytes]:
    """Return the keys of the states after a prefix, one for each group of layers with states.

    Args:
        prefix: Key of the prefix's last block, which identifies all tokens up to its end.
    """
    return [
        hashlib.blake2b(prefix, digest_size=_DIGEST_BYTES, person=b"state %d" % group).digest()
        for group in range(num_groups)
    ]


def block_ends(num_tokens: int, block_size: int) -> list[int]:
    """Return the ends of blocks before the last of ``num_tokens`` tokens, the latest first."""
    last = (num_tokens - 1) // block_size
    return [end * block_size for end in range(last, 0, -1)]


def chunk_end(start: int, end: int, prompt_end: int, block_size: int) -> int:
    """Return where a step stops within a prompt: at a block's end if possible, and at the last one.

    A later request with the same prompt continues from the last block's end, since the last token
    is always computed.

    Args:
        start: Number of tokens computed before the step.
        end: Number of tokens that the step could reach; more than ``start``.
        prompt_end: End of the prompt, or of output that is computed again, in tokens.

    Returns:
        Number of tokens, more than ``start`` and at most ``end``.
    """
    if start >= prompt_end:
        return end
    last = (prompt_end - 1) // block_size * block_size
    if start < last < end:
        return last
    aligned = end // block_size * block_size
    return aligned if end < prompt_end and aligned > start else end
