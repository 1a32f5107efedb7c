"""MLA's rotary positions on a CPU: vLLM's kernel takes them for those of one head."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm import _custom_ops as ops
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

from banaserve.engine.compat.config import is_on_cpu
from banaserve.engine.engine_args import goes_without_rotary_kernel, rotate_latents_in_torch

HEADS, SIZE, POSITIONS = 4, 64, 16


@pytest.mark.parametrize(
    ("use_mla", "asked", "found"),
    [
        (True, [], ["-rotary_embedding"]),
        (True, ["none", "+rms_norm"], ["none", "+rms_norm", "-rotary_embedding"]),
        (True, ["+rotary_embedding"], ["+rotary_embedding"]),
        (True, ["-rotary_embedding"], ["-rotary_embedding"]),
        (False, [], []),
    ],
)
def test_models_with_mla_go_without_the_kernel_unless_the_user_names_it(
    use_mla: bool, asked: list[str], found: list[str]
) -> None:
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(use_mla=use_mla),
        compilation_config=SimpleNamespace(custom_ops=asked),
    )
    rotate_latents_in_torch(config)
    assert config.compilation_config.custom_ops == found
    assert goes_without_rotary_kernel(config) == ("-rotary_embedding" in found)


@pytest.mark.skipif(not is_on_cpu(), reason="it is the CPU's kernel")
def test_the_kernel_is_still_wrong_of_queries_with_heads() -> None:
    """Once it is right, ``rotate_latents_in_torch`` can go."""
    torch.manual_seed(0)
    angles = torch.outer(torch.arange(POSITIONS).float(), torch.rand(SIZE // 2))
    cache = torch.cat([angles.cos(), angles.sin()], dim=-1)
    positions = torch.arange(POSITIONS)
    query, key = torch.randn(POSITIONS, HEADS, SIZE), torch.randn(POSITIONS, 1, SIZE)
    right, _ = RotaryEmbedding.forward_static(
        positions, query.clone(), key.clone(), SIZE, SIZE, cache, False
    )

    def rotated(query: torch.Tensor) -> torch.Tensor:
        ops.rotary_embedding(positions, query, key.clone(), SIZE, cache, False)
        return query

    flat = rotated(query.flatten(1).clone()).view_as(query)
    torch.testing.assert_close(flat, right, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(rotated(query.clone()), right, atol=0.1)
