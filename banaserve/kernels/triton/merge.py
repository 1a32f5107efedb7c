"""Merge of parts of a sequence in Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_parts", "num_rows", "lses_by_part"])
def merge_stacked(
    outputs,
    lses,
    output,
    lse,
    num_parts,
    num_rows,
    num_heads,
    outputs_by_part,
    outputs_by_token,
    outputs_by_head,
    lses_by_part,
    lses_by_token,
    lses_by_head,
    HEAD_SIZE: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    """Merge the parts in one tensor ``[num_parts, num_tokens, num_heads, HEAD_SIZE]``.

    Grid: tiles of rows, a row being a token's head. ``output`` and ``lse`` are contiguous.
    """
    rows = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    in_rows = rows < num_rows
    token = rows // num_heads
    head = rows % num_heads
    peak = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    summed = tl.zeros([TILE_ROWS, HEAD_PADDED], tl.float32)
    at = token * outputs_by_token + head * outputs_by_head
    lse_at = token * lses_by_token + head * lses_by_head
    for part in range(num_parts):
        base = tl.cast(part, tl.int64)
        peak, total, summed = add_part(
            outputs + base * outputs_by_part + at,
            lses + base * lses_by_part + lse_at,
            in_rows,
            peak,
            total,
            summed,
            HEAD_SIZE,
            HEAD_PADDED,
        )
    finish(output, lse, rows, in_rows, peak, total, summed, HEAD_SIZE, HEAD_PADDED)


@triton.jit(do_not_specialize=["num_rows"])
def merge_apart(
    outputs,
    lses,
    strides,
    output,
    lse,
    num_rows,
    num_heads,
    NUM_PARTS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    """Merge a few parts in separate tensors, so that they need not be stacked first.

    Grid: tiles of rows. ``outputs`` and ``lses`` are tuples of pointers, ``strides`` a tuple with
    four for each part: of outputs by token and head, of lses by token and head.
    """
    rows = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    in_rows = rows < num_rows
    token = rows // num_heads
    head = rows % num_heads
    peak = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    summed = tl.zeros([TILE_ROWS, HEAD_PADDED], tl.float32)
    for part in tl.static_range(NUM_PARTS):
        peak, total, summed = add_part(
            outputs[part] + token * strides[4 * part] + head * strides[4 * part + 1],
            lses[part] + token * strides[4 * part + 2] + head * strides[4 * part + 3],
            in_rows,
            peak,
            total,
            summed,
            HEAD_SIZE,
            HEAD_PADDED,
        )
    finish(output, lse, rows, in_rows, peak, total, summed, HEAD_SIZE, HEAD_PADDED)


@triton.jit
def add_part(
    outputs,
    lses,
    in_rows,
    peak,
    total,
    summed,
    HEAD_SIZE: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
):
    """Add one part, given by pointers to its rows; return the new maximum, weights and sum."""
    part = tl.load(lses, mask=in_rows, other=float("-inf"))
    # FlashAttention 2 returns +inf for an empty range, all others -inf.
    part = tl.where(part == float("inf"), float("-inf"), part)
    higher = tl.maximum(peak, part)
    floor = tl.where(higher == float("-inf"), 0.0, higher)
    weight = tl.exp(part - floor)
    fade = tl.exp(peak - floor)
    dims = tl.arange(0, HEAD_PADDED)
    # An empty part's output may be unwritten memory: even multiplied by zero it must not be added.
    counts = in_rows & (part != float("-inf"))
    mask = counts[:, None] & (dims < HEAD_SIZE)[None, :]
    values = tl.load(outputs[:, None] + dims[None, :], mask=mask, other=0.0).to(tl.float32)
    return higher, total * fade + weight, summed * fade[:, None] + values * weight[:, None]


@triton.jit
def finish(
    output,
    lse,
    rows,
    in_rows,
    peak,
    total,
    summed,
    HEAD_SIZE: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
):
    """Divide by the weights and store; rows without weights get zero and an lse of -inf."""
    saw = total > 0.0
    divisor = tl.where(saw, total, 1.0)
    found = tl.where(saw, peak + tl.log(divisor), float("-inf"))
    tl.store(lse + rows, found, mask=in_rows)
    dims = tl.arange(0, HEAD_PADDED)
    mask = in_rows[:, None] & (dims < HEAD_SIZE)[None, :]
    summed = summed / divisor[:, None]
    at = rows[:, None] * HEAD_SIZE + dims[None, :]
    tl.store(output + at, summed.to(output.dtype.element_ty), mask=mask)
