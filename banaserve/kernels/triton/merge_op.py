"""``banaserve::merge_parts``: the merge in Triton as an operator that torch can trace."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from banaserve.kernels.tiling import next_power_of_2
from banaserve.kernels.triton.launch import check_device, on_device
from banaserve.kernels.triton.merge import merge_apart, merge_stacked

# Each number of parts compiles to its own kernel; above this, stacking costs less than compiling.
_MAX_APART = 8
_TILE_ELEMENTS = 1024


def launch_merge_stacked(
    outputs: torch.Tensor, lses: torch.Tensor, output: torch.Tensor, lse: torch.Tensor
) -> None:
    """Merge ``[num_parts, num_tokens, num_heads, head_size]`` into contiguous tensors."""
    num_parts, num_tokens, num_heads, head_size = outputs.shape
    num_rows, tile_rows = num_tokens * num_heads, _tile_rows(head_size)
    merge_stacked[(-(-num_rows // tile_rows),)](
        outputs,
        lses,
        output,
        lse,
        num_parts,
        num_rows,
        num_heads,
        *outputs.stride()[:3],
        *lses.stride(),
        HEAD_SIZE=head_size,
        HEAD_PADDED=next_power_of_2(head_size),
        TILE_ROWS=tile_rows,
    )


@torch.library.custom_op(
    "banaserve::merge_parts",
    mutates_args=(),
    schema="(Tensor[] outputs, Tensor[] lses) -> (Tensor, Tensor)",
)
def merge_parts(
    outputs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``interface.Kernels.merge`` of arguments that the caller has checked.

    Args:
        outputs: ``[num_tokens, num_heads, head_size]`` each.
        lses: ``[num_tokens, num_heads]`` float32 each.

    Returns:
        Output and lse of the same shapes and dtypes, contiguous.
    """
    first = outputs[0]
    check_device("output", first)
    num_tokens, num_heads, head_size = first.shape
    output = first.new_empty(first.shape)
    lse = first.new_empty(first.shape[:2], dtype=torch.float32)
    num_rows, tile_rows = num_tokens * num_heads, _tile_rows(head_size)
    if not output.numel():
        return output, lse
    with on_device(first):
        if len(outputs) > _MAX_APART:
            launch_merge_stacked(torch.stack(list(outputs)), torch.stack(list(lses)), output, lse)
            return output, lse
        pairs = zip(outputs, lses, strict=True)
        merge_apart[(-(-num_rows // tile_rows),)](
            tuple(outputs),
            tuple(lses),
            tuple(n for part, its in pairs for n in (*part.stride()[:2], *its.stride())),
            output,
            lse,
            num_rows,
            num_heads,
            NUM_PARTS=len(outputs),
            HEAD_SIZE=head_size,
            HEAD_PADDED=next_power_of_2(head_size),
            TILE_ROWS=tile_rows,
        )
    return output, lse


@merge_parts.register_fake
def _(
    outputs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    first = outputs[0]
    return first.new_empty(first.shape), first.new_empty(first.shape[:2], dtype=torch.float32)


def _tile_rows(head_size: int) -> int:
    return max(1, _TILE_ELEMENTS // next_power_of_2(head_size))
