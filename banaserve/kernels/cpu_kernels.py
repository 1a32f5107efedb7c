"""Attention by torch's flash kernel for CPUs, which tells its log-sum-exp; float32 throughout."""

from __future__ import annotations

import torch

from banaserve.kernels.reference import ReferenceKernels


class CpuKernels(ReferenceKernels):
    """The reference in float32, with the products and the softmax in one call a sequence.

    Outputs are float32 whatever the query's type, so that nothing is lost before a merge.
    """

    name = "cpu"

    def __init__(self) -> None:
        super().__init__(torch.float32, torch.float32)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        visible: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num, heads, size = query.shape
        kv_heads = key.shape[1]
        group = heads // kv_heads
        # The query heads of a KV head ask as more tokens would, so no key is repeated.
        rows = query.view(num, kv_heads, group, size).permute(1, 2, 0, 3).flatten(1, 2)
        mask = None
        if visible is not None:
            mask = torch.zeros(visible.shape).masked_fill_(~visible, float("-inf"))
            mask = mask.repeat(group, 1)[None, None]
        output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            rows[None],
            key.transpose(0, 1)[None],
            value.transpose(0, 1)[None],
            0.0,
            False,
            attn_mask=mask,
            scale=scale,
        )
        output = output[0].view(kv_heads, group, num, size).permute(2, 0, 1, 3).flatten(1, 2)
        lse = lse[0].reshape(kv_heads, group, num).permute(2, 0, 1).flatten(1, 2)
        if visible is not None and not bool((seen := visible.any(1)).all()):
            output[~seen], lse[~seen] = 0.0, float("-inf")
        return output, lse
