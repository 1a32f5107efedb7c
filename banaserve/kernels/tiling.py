"""Tiling of partial attention for a GPU. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

MIN_SPLIT_TOKENS = 256
MAX_SPLITS = 128
# Programs per multiprocessor: enough that the GPU is hardly idle while the last ones run.
_PROGRAMS_EACH = 8
# Rows of a sequence from which on arithmetic counts as much as bandwidth.
_PREFILL_ROWS = 32
# By bytes of an element and of a padded head: keys of a step for decode and for prefill. Compiled
# for sm_90, these values spill no register.
_KEYS = {
    (2, 128): (64, 64),
    (2, 256): (64, 64),
    (2, 512): (32, 32),
    (4, 256): (32, 32),
    (4, 512): (32, 16),
    (4, 1024): (16, 16),
}
# Triton's pipeline counts the lookup in the block table as a separate stage: half of these stages
# are tiles of keys and values that are being loaded.
_DECODE_STAGES, _PREFILL_STAGES = 5, 3


@dataclass(frozen=True, slots=True)
class Tiling:
    """Sizes of the tiles of partial attention.

    Attributes:
        rows: Query rows of a tile: query heads of one KV head for neighbouring tokens.
        keys: Keys of a step.
        num_warps: Number of warps of a program.
        num_stages: Number of steps whose loads are under way at once.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def choose_tiling(
    num_tokens: int, num_seqs: int, group_size: int, head_size: int, element_bytes: int
) -> Tiling:
    """Choose tiles for a batch of this shape: few rows for decode, many for prefill."""
    smallest = max(16, next_power_of_2(group_size))
    head_bytes = next_power_of_2(head_size) * element_bytes
    decode_keys, prefill_keys = _KEYS[element_bytes, head_bytes]
    is_float32 = element_bytes == 4
    if num_tokens * group_size < _PREFILL_ROWS * num_seqs:
        return Tiling(smallest, decode_keys, 8 if is_float32 else 4, _DECODE_STAGES)
    rows = max(smallest, 32 if is_float32 else 64)
    num_warps = 8 if is_float32 or head_bytes >= 512 else 4
    return Tiling(rows, prefill_keys, num_warps, _PREFILL_STAGES)


def choose_num_splits(
    num_tokens: int,
    num_seqs: int,
    num_kv_heads: int,
    group_size: int,
    tile_rows: int,
    max_range_tokens: int,
    num_multiprocessors: int,
) -> int:
    """Return the number of parts to cut each range into to fill the GPU without tiny parts."""
    tiles = max(num_seqs, -(-num_tokens // (tile_rows // group_size)))
    wanted = -(-_PROGRAMS_EACH * num_multiprocessors // (tiles * num_kv_heads))
    return max(1, min(wanted, max_range_tokens // MIN_SPLIT_TOKENS, MAX_SPLITS))


def next_power_of_2(number: int) -> int:
    """Return the smallest power of two that is not below ``number``, which is at least 1."""
    return 1 << (number - 1).bit_length()
