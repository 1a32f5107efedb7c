"""Routed experts of vLLM's mixture-of-experts layers: computing some of them separately."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExpertsOrder
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)

__all__ = ["RoutedExperts"]

_BY_EXPERT = ("w13_weight", "w2_weight", "w13_bias", "w2_bias")


def experts_of(layer: nn.Module) -> RoutedExperts | None:
    """Return the routed experts of a decoder layer; None if its MLP is dense."""
    found = [module for module in layer.modules() if isinstance(module, RoutedExperts)]
    return found[0] if len(found) == 1 else None


def split_blocker(experts: RoutedExperts) -> str:
    """Return why a layer's experts cannot be computed in several places; empty if they can."""
    method = experts.quant_method
    if not isinstance(method, UnquantizedFusedMoEMethod):
        return "its experts are quantized, whose scales cannot be told apart by expert"
    if method.is_monolithic:
        return "its kernel chooses experts and computes them in one"
    if experts.expert_map is not None:
        return "its experts lie on several ranks already (expert parallel)"
    return ""


def compute_experts(
    experts: RoutedExperts, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """Compute the weighted sum of some experts' outputs for each token.

    Args:
        x: ``[num_tokens, hidden_size]``.
        weights: ``[num_tokens, k]``, float32.
        ids: Ids of the experts, ``[num_tokens, k]``.
    """
    output: torch.Tensor = experts.quant_method.apply(
        layer=experts,
        x=x,
        topk_weights=weights,
        topk_ids=ids,
        shared_experts=None,
        shared_experts_input=None,
    )
    return output


def run_shared_experts(shared: Any, x: torch.Tensor | None) -> None:
    """Run the shared experts, if any, as vLLM's kernel does in the middle of its own work."""
    if shared is not None and x is not None:
        shared(x, SharedExpertsOrder.MK_INTERNAL_OVERLAPPED)


def join_shared_experts(shared: Any, x: torch.Tensor | None) -> None:
    """Wait now for shared experts on a stream of their own, and not after the routed experts.

    A CUDA graph cannot be broken while it has two streams.
    """
    if shared is None or x is None:
        return
    order = shared._determine_shared_experts_order(x)
    if order == SharedExpertsOrder.MULTI_STREAM_OVERLAPPED:
        shared.wait()
        shared.wait = lambda: delattr(shared, "wait")  # the next call, which has nothing to do


def place_experts(experts: RoutedExperts, forward: Callable[..., torch.Tensor] | None) -> None:
    """Replace the function that computes a layer's experts; None restores vLLM's own."""
    if forward is not None:
        experts.forward_modular = forward  # type: ignore[method-assign]
    else:
        experts.__dict__.pop("forward_modular", None)


def weights_by_expert(experts: RoutedExperts) -> list[nn.Parameter]:
    """Return the experts' parameters whose first dimension is the expert."""
    found = (getattr(experts, name, None) for name in _BY_EXPERT)
    return [parameter for parameter in found if parameter is not None]


def set_num_experts(experts: RoutedExperts, count: int) -> None:
    """Set the number of experts that are left."""
    experts.global_num_experts = experts.local_num_experts = count
