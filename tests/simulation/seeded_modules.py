"""A model whose layers and KV heads move: what it computes shows every wrong byte of its KV.

Each layer keeps a number for each token, by the token, its own number, the head and the weights,
and adds up all of them that came before. It runs on the real host: proxies, placement and copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from vllm.v1.attention.backend import CommonAttentionMetadata

from banaserve.base.errors import GuestLostError
from banaserve.migration.kv.step_context import common_from
from banaserve.migration.modules.layer_proxy import RunLayers
from banaserve.migration.modules.split_attention import RemoteAttention, RunAttention
from banaserve.migration.rpc import messages
from banaserve.migration.rpc.tensors import TensorBundle, from_wire, restore
from banaserve.migration.units.guest_unit import Answer, DescribedStep, GuestServices, GuestUnit
from banaserve.migration.units.heads import HeadStep
from banaserve.migration.units.layers import LayerRange
from banaserve.serving.moves.sizes import ModelFacts
from banaserve.transport.interface import Tensor, Transport
from seeded_threads import sleep

NUM_LAYERS, NUM_HEADS, BLOCK = 4, 2, 4
NAMES = [f"layers.{layer}.attn" for layer in range(NUM_LAYERS)]
FACTS = ModelFacts(NUM_LAYERS, NUM_HEADS, layer_weight_bytes=1000)
_NO_IMPL = {"sliding_window": None, "scale": 1.0, "logits_soft_cap": None}


def kept_of(tokens: Any, layer: int, head: int, weights: int) -> Any:
    """What a layer keeps of tokens."""
    return tokens + 20.0 * (1 + layer * NUM_HEADS + head) + 200.0 * weights


def result_of(tokens: Sequence[int], weights: int) -> float:
    """What the model computes at the last of ``tokens``."""
    positions, known = np.arange(1, len(tokens) + 1), np.asarray(tokens, np.float64)
    cells = [(layer, head) for layer in range(NUM_LAYERS) for head in range(NUM_HEADS)]
    return float(sum((positions * kept_of(known, *cell, weights)).sum() for cell in cells))


def attend(
    cache: torch.Tensor,
    common: CommonAttentionMetadata,
    kept: torch.Tensor,
    heads: Sequence[int] | None = None,
) -> torch.Tensor:
    """Keep new numbers and add up all that were kept, at the last token of each request.

    As in vLLM's kernels, what no token has written of a block is multiplied by zero.

    Args:
        cache: ``[num_blocks, num_heads, BLOCK]``.
        kept: ``[num_tokens, heads]``.
        heads: Which of the cache; None: all.

    Returns:
        Their sum over ``heads``, ``[num_tokens]``.
    """
    numbers, slots = cache.numpy(), common.slot_mapping.numpy()
    which = np.arange(numbers.shape[1]) if heads is None else np.asarray(heads)
    if not len(which):
        return torch.zeros(len(kept), dtype=torch.float64)
    numbers[(slots // BLOCK)[:, None], which, (slots % BLOCK)[:, None]] = kept.numpy()
    lengths = common.seq_lens.numpy()[:, None]
    table = common.block_table_tensor.numpy()
    seen = numbers[table][:, :, which].astype(np.float64).sum(axis=2).reshape(len(table), -1)
    places = np.arange(seen.shape[1])
    is_own = places // BLOCK <= (lengths - 1) // BLOCK
    factors = (places + 1) * (places < lengths)
    outputs = torch.zeros(len(kept), dtype=torch.float64)
    sums = (np.where(is_own, seen, 0.0) * factors).sum(axis=1)
    outputs[common.query_start_loc_cpu[1:].long() - 1] = torch.from_numpy(sums)
    return outputs


def kept_of_heads(tokens: torch.Tensor, layer: int, heads: Sequence[int], weights: int) -> Any:
    """``[num_tokens, heads]`` of what a layer keeps."""
    return torch.stack([kept_of(tokens, layer, head, weights) for head in heads], dim=1)


class Attention:
    """An attention of vLLM as units look at it."""

    num_kv_heads = num_heads = NUM_HEADS
    head_size = 1

    def __init__(self) -> None:
        self.impl = _Impl()


class _Impl:
    def __init__(self) -> None:
        self.__dict__ |= _NO_IMPL


class ModelLayer(nn.Module):
    """One layer at home, whose heads may be elsewhere."""

    def __init__(self, number: int, weights: int, runner: Any) -> None:
        super().__init__()
        self._number, self._weights = number, weights
        self._runner = [runner]  # no submodule

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        host = self._runner[0].host
        name, common = NAMES[self._number], host.step_context.common
        tokens, outputs = hidden_states[:, 0], hidden_states[:, 1].clone()
        away = list(host.engine.split_heads[name].units.values())
        gone = {head for heads, _ in away for head in heads}
        for heads, remote in away:
            outputs += self._elsewhere(host, remote, heads, tokens)
        if here := [head for head in range(NUM_HEADS) if head not in gone]:
            kept = kept_of_heads(tokens, self._number, here, self._weights)
            outputs += attend(host.kv.tensors[name], common, kept, here)
        return torch.stack([tokens, outputs], dim=1)

    def _elsewhere(
        self, host: Any, remote: RemoteAttention, heads: Sequence[int], tokens: torch.Tensor
    ) -> torch.Tensor:
        query = kept_of_heads(tokens, self._number, heads, self._weights)[:, :, None]
        try:
            remote.submit(NAMES[self._number], query, query, query)
            return remote.collect(query)[0][:, 0, 0]
        except GuestLostError as error:
            host.guest_lost(remote.link, error)
            return torch.zeros(len(tokens), dtype=torch.float64)


class SplitDouble:
    """Heads of one attention that are away, by unit; see ``SplitHeads``."""

    def __init__(self) -> None:
        self.units: dict[str, tuple[Sequence[int], RemoteAttention]] = {}

    def arrange(self, unit_id: str, heads: Sequence[int], where: RemoteAttention | None) -> None:
        self.units.pop(unit_id, None)
        if where is not None:
            self.units[unit_id] = heads, where


# ---- in a guest


class _Kept(GuestUnit):
    """KV of some heads of some layers.

    Args:
        heads: How many of each attention.
    """

    def __init__(
        self,
        config: Any,
        transport: Transport,
        request: messages.Build[Any],
        heads: Mapping[str, int],
        epoch: int,
    ) -> None:
        super().__init__(config, transport)
        sleep(0.02 * len(heads))
        self._caches = self._offer(request, heads, epoch)

    def _attend(
        self, name: str, common: CommonAttentionMetadata, kept: torch.Tensor
    ) -> torch.Tensor:
        """``[num_tokens]``, of what is kept of each."""
        sleep(0.002)
        return attend(self._caches[name], common, kept)


class GuestLayersDouble(_Kept):
    """Layers; see ``GuestLayers``."""

    serves = RunLayers

    def __init__(self, config: Any, transport: Transport, request: Any, epoch: int) -> None:
        self._layers = request.modules.layers
        heads = {NAMES[layer]: NUM_HEADS for layer in self._layers}
        super().__init__(config, transport, request, heads, epoch)
        self.weight_bytes = 1000 * len(heads)

    def serve(
        self, request: RunLayers, tensors: Sequence[Tensor], services: GuestServices
    ) -> Answer:
        services.expect(request.num_follow)
        common = common_from(restore(request.step, tensors))
        hidden = restore(request.arguments, tensors)["hidden_states"]
        tokens, outputs = hidden[:, 0], hidden[:, 1].clone()
        weights: Any = self._config
        for layer in self._layers:
            kept = kept_of_heads(tokens, layer, range(NUM_HEADS), weights.number)
            outputs += self._attend(NAMES[layer], common, kept)
        bundle = TensorBundle()
        index = bundle.put(torch.stack([tokens, outputs], dim=1))
        return messages.StepOutputs((index,)), bundle


class GuestHeadsDouble(_Kept):
    """Heads, whose keys the host computes; see ``GuestHeads``."""

    serves = RunAttention

    def __init__(self, config: Any, transport: Transport, request: Any, epoch: int) -> None:
        heads = {part.name: part.num_kv_heads for part in request.slices}
        super().__init__(config, transport, request, heads, epoch)
        self._described: DescribedStep[HeadStep] = DescribedStep()

    def serve(self, request: RunAttention, tensors: Sequence[Tensor], _: GuestServices) -> Answer:
        if request.step is not None:
            common = common_from(restore(request.step, tensors))
            self._described.set(request.step_id, HeadStep(common))
        step = self._described.get(request.step_id)
        kept = from_wire(tensors[1])[:, :, 0]
        bundle = TensorBundle()
        outputs = self._attend(request.name, step.common, kept)
        bundle.put(outputs[:, None, None].repeat(1, kept.shape[1], 1))  # shaped as the query
        return messages.StepOutputs((0,)), bundle


def build_unit(config: Any, transport: Transport, request: Any, epoch: int) -> GuestUnit:
    """Build a guest's unit; see ``registry.build_unit``."""
    is_layers = isinstance(request.modules, LayerRange)
    kind = GuestLayersDouble if is_layers else GuestHeadsDouble
    return kind(config, transport, request, epoch)
