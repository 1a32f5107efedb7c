"""Time of an engine's step on a GPU, as the sum of measured operators."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from banaserve_bench.silicon.attention import AttentionTable, Contexts
from banaserve_bench.silicon.interpolation import Grid


class GpuStepTimes(Protocol):
    """Source of the times that a GPU takes for steps, without the CPU's work between steps."""

    def step_s(
        self, tokens: int, pairs: int, batch: int, context: int, contexts: Contexts | None = None
    ) -> float:
        """Return the GPU's time of one step, in seconds.

        Args:
            tokens: Prompt tokens that the step computes.
            pairs: Sum of c (c + 2 h) over all chunks of c tokens after h computed ones.
            batch: Number of requests that decode.
            context: Tokens of these requests, together.
            contexts: Contexts of these requests; None if they count as equal.
        """
        ...


@dataclass(frozen=True, slots=True)
class Experts:
    """Measured times of a layer's experts.

    Attributes:
        times: Time in seconds, by tokens of the step and number of experts that get any of them.
    """

    num_experts: int
    experts_per_token: int
    times: Grid

    def layer_s(self, tokens: int) -> float:
        """Return the time of a layer's experts if tokens choose theirs evenly and independently."""
        missed = (1 - self.experts_per_token / self.num_experts) ** tokens
        return self.times(tokens, self.num_experts * (1 - missed))


@dataclass(frozen=True, slots=True)
class OperatorSums:
    """Step times as sums of one engine's operators (``GpuStepTimes``).

    Attributes:
        num_layers: Number of layers of the model.
        layer: Time of a layer's operators except attention and experts, by tokens, in seconds.
        once: Time of operators that run once in a step, by tokens, in seconds.
        sampled: Time of output head and sampler, by sequences that get a token, in seconds.
        experts: Times of experts; None for a dense model.
        graph_sizes: Ascending numbers of tokens for which CUDA graphs exist; a step that only
            decodes is padded to the next of them.
    """

    num_layers: int
    layer: Grid
    once: Grid
    sampled: Grid
    attention: AttentionTable
    experts: Experts | None = None
    graph_sizes: Sequence[int] = ()

    def step_s(
        self, tokens: int, pairs: int, batch: int, context: int, contexts: Contexts | None = None
    ) -> float:
        """Return the GPU's time of one step; see ``GpuStepTimes``."""
        computed = tokens + batch if tokens else self._padded(batch)
        layer_s = self.layer(computed)
        layer_s += self.attention.step_s(tokens, pairs, batch, context, contexts)
        if self.experts is not None:
            layer_s += self.experts.layer_s(computed)
        # One prompt of a step with prompt tokens is taken to end in it and to get a token.
        sequences = batch + 1 if tokens else batch
        return self.num_layers * layer_s + self.once(computed) + self.sampled(sequences)

    def _padded(self, batch: int) -> int:
        place = bisect_left(self.graph_sizes, batch)
        return self.graph_sizes[place] if place < len(self.graph_sizes) else batch


def graph_sizes(largest: int) -> tuple[int, ...]:
    """Return vLLM's default sizes of CUDA graphs, in tokens, up to ``largest``."""
    sizes = (1, 2, 4, *range(8, 256, 8), *range(256, largest + 1, 16))
    return tuple(size for size in sizes if size <= largest)
