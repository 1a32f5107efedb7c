"""Partial attention in Triton: one program for a tile of query rows, a KV head and a split.

The rows of a tile are the query heads of one KV head for a few neighbouring tokens, so each key and
value is read once for all of them. The range of a sequence is cut into equal splits, whose results
``merge_stacked`` merges: a long context with a small batch still occupies the whole GPU.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
_LN_2 = tl.constexpr(0.6931471805599453)


# Each step has other sizes: a kernel compiled for those of one would keep another waiting.
@triton.jit(do_not_specialize=["num_seqs", "table_by_seq", "lse_by_split"])
def attend_parts(
    query,
    key,
    value,
    block_table,
    query_start,
    query_position,
    range_start,
    range_end,
    kv_heads,
    query_groups,
    output,
    lse,
    scale_log2,
    num_seqs,
    query_by_token,
    query_by_head,
    key_by_block,
    key_by_token,
    key_by_head,
    value_by_block,
    value_by_token,
    value_by_head,
    table_by_seq,
    output_by_split,
    output_by_token,
    lse_by_split,
    lse_by_token,
    BLOCK_SIZE: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Compute partial attention. Grid: tiles of all sequences, chosen KV heads, splits.

    Writes ``output`` ``[num_splits, num_tokens, num_chosen * GROUP_SIZE, HEAD_SIZE]``, whose heads
    are contiguous, and ``lse`` likewise without the last dimension. Where a split sees no key, lse
    is -inf and, with more than one split, the output is not written. ``UPCAST`` multiplies in
    float32, since Triton's interpreter treats bf16 as integers.
    """
    TILE_TOKENS: tl.constexpr = TILE_ROWS // GROUP_SIZE
    seq, tile = find_tile(query_start, num_seqs, tl.program_id(0), TILE_TOKENS)
    chosen = tl.program_id(1)
    first = tl.load(query_start + seq)
    num_asking = tl.load(query_start + seq + 1) - first
    if tile * TILE_TOKENS >= num_asking:
        return
    rows = tl.arange(0, TILE_ROWS)
    token = tile * TILE_TOKENS + rows // GROUP_SIZE
    asking = (rows < TILE_TOKENS * GROUP_SIZE) & (token < num_asking)
    position = tl.load(query_position + seq)
    head = tl.load(query_groups + chosen) * GROUP_SIZE + rows % GROUP_SIZE
    at = (first + token).to(tl.int64) * query_by_token + head.to(tl.int64) * query_by_head
    asked = load_rows(query, at, asking, HEAD_SIZE, HEAD_PADDED)
    low = tl.maximum(tl.load(range_start + seq), 0)
    high = tl.load(range_end + seq)
    if CAUSAL:
        high = tl.minimum(high, position + tl.minimum((tile + 1) * TILE_TOKENS, num_asking))
    begin, end = cut(low, high, TILE_KEYS)
    kv_head = tl.load(kv_heads + chosen).to(tl.int64)
    peak, total, summed = attend_range(
        asked, key + kv_head * key_by_head, value + kv_head * value_by_head,
        block_table + seq.to(tl.int64) * table_by_seq, begin, end, position + token, scale_log2,
        key_by_block, key_by_token, value_by_block, value_by_token,
        BLOCK_SIZE, HEAD_SIZE, HEAD_PADDED, TILE_ROWS, TILE_KEYS, CAUSAL, UPCAST,
    )  # fmt: skip
    split = tl.program_id(2).to(tl.int64)
    token_at = (first + token).to(tl.int64)
    head = chosen * GROUP_SIZE + rows % GROUP_SIZE
    store_part(
        lse + split * lse_by_split + token_at * lse_by_token + head,
        output + split * output_by_split + token_at * output_by_token + head * HEAD_SIZE,
        peak, total, summed, asking, HEAD_SIZE, HEAD_PADDED, IS_SPLIT,
    )  # fmt: skip


@triton.jit
def load_rows(query, at, asking, HEAD_SIZE: tl.constexpr, HEAD_PADDED: tl.constexpr):
    """Load the query rows at ``at``, ``[TILE_ROWS, HEAD_PADDED]``; zero for rows not ``asking``."""
    dims = tl.arange(0, HEAD_PADDED)
    mask = asking[:, None] & (dims < HEAD_SIZE)[None, :]
    return tl.load(query + at[:, None] + dims[None, :], mask=mask, other=0.0)


@triton.jit
def store_part(
    lse,
    output,
    peak,
    total,
    summed,
    asking,
    HEAD_SIZE: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    IS_SPLIT: tl.constexpr,
):
    """Store the results of ``attend_range`` at each row's pointers ``lse`` and ``output``."""
    dims = tl.arange(0, HEAD_PADDED)
    mask = asking[:, None] & (dims < HEAD_SIZE)[None, :]
    saw = total > 0.0
    found = tl.where(saw, (peak + tl.log2(tl.where(saw, total, 1.0))) * _LN_2, float("-inf"))
    tl.store(lse, found, mask=asking)
    if IS_SPLIT:
        mask = mask & saw[:, None]
    summed = summed / tl.where(saw, total, 1.0)[:, None]
    at = output[:, None] + dims[None, :]
    tl.store(at, summed.to(output.dtype.element_ty), mask=mask)


@triton.jit
def find_tile(query_start, num_seqs, program, TILE_TOKENS: tl.constexpr):
    """Return the sequence that a program works for, and the index of its tile there.

    Sequence ``s`` owns the programs from ``query_start[s] // TILE_TOKENS + s`` on: at most one more
    than its tokens need. So no table has to be made on the host.
    """
    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start + middle) // TILE_TOKENS + middle <= program:
            low = middle
        else:
            high = middle
    return low, program - (tl.load(query_start + low) // TILE_TOKENS + low)


@triton.jit
def cut(low, high, TILE_KEYS: tl.constexpr):
    """Return this program's share of a range: whole tiles, equal for all splits but the last."""
    num_splits = tl.num_programs(2)
    share = tl.cdiv(tl.cdiv(tl.maximum(high - low, 0), num_splits), TILE_KEYS) * TILE_KEYS
    begin = low + tl.program_id(2) * share
    return begin, tl.minimum(begin + share, high)


@triton.jit
def attend_range(
    asked,
    key,
    value,
    table,
    begin,
    end,
    last,
    scale_log2,
    key_by_block,
    key_by_token,
    value_by_block,
    value_by_token,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Compute softmax over the keys ``begin`` to ``end`` with a running maximum, to base 2.

    Returns:
        The maximum score ``[TILE_ROWS]``, the sum of the exponentials relative to it, and the
        weighted sum of values ``[TILE_ROWS, HEAD_PADDED]``, not divided; all float32.
    """
    dims = tl.arange(0, HEAD_PADDED)
    in_head = dims < HEAD_SIZE
    peak = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    summed = tl.zeros([TILE_ROWS, HEAD_PADDED], tl.float32)
    for start in range(begin, end, TILE_KEYS):
        at = start + tl.arange(0, TILE_KEYS)
        in_range = at < end
        block = tl.load(table + at // BLOCK_SIZE, mask=in_range, other=0).to(tl.int64)
        in_block = at % BLOCK_SIZE
        where = block * key_by_block + in_block * key_by_token
        mask = in_head[:, None] & in_range[None, :]
        keys = tl.load(key + where[None, :] + dims[:, None], mask=mask, other=0.0)
        scores = multiply(asked, keys, UPCAST) * scale_log2
        visible = in_range[None, :]
        if CAUSAL:
            visible = visible & (at[None, :] <= last[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        # A row that has seen nothing yet has no maximum; -inf minus -inf would be NaN.
        floor = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - floor[:, None])
        fade = tl.exp2(peak - floor)
        total = total * fade + tl.sum(weights, 1)
        where = block * value_by_block + in_block * value_by_token
        mask = in_range[:, None] & in_head[None, :]
        values = tl.load(value + where[:, None] + dims[None, :], mask=mask, other=0.0)
        summed = summed * fade[:, None]
        summed += multiply(weights.to(values.dtype), values, UPCAST)
        peak = higher
    return peak, total, summed


@triton.jit
def multiply(left, right, UPCAST: tl.constexpr):
    """Multiply matrices in float32; ``ieee`` keeps float32 operands from being cut to tf32."""
    if UPCAST:
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, input_precision="ieee")
