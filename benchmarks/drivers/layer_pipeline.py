"""Overlap of fetching a prefix, layer by layer, with computing the rest. Pure.

BanaServe section 4.2, corrected. Of a prompt of ``L`` tokens the fraction ``r`` is fetched and
``1 - r`` is computed, over ``N`` layers:

- Eq. 12 gives a layer's compute time as ``T_F r / N``. Only misses are computed, so it is
  ``T_F (1 - r) / N`` (the two agree at ``r = 1/2``, the paper's example).
- Eq. 13 gives a layer's fetch as ``S_kv L r / B``. The other direction carries the rest:
  a layer's store is ``S_kv L (1 - r) / B``, with ``B`` for each direction.

``T_F`` is the time to compute the whole prompt with nothing cached, ``S_kv`` the bytes of one
token's K and V in one layer, ``B`` the bandwidth in bytes a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prefill:
    """A prompt of which a part is fetched.

    Attributes:
        full_compute_s: ``T_F``, seconds to compute the whole prompt with nothing cached.
        num_layers: ``N``, number of layers.
        num_tokens: ``L``, tokens of the prompt.
        cached_fraction: ``r``, fraction of the prompt that is fetched, in [0, 1].
        token_layer_bytes: ``S_kv``, bytes of one token's K and V in one layer.
    """

    full_compute_s: float
    num_layers: int
    num_tokens: int
    cached_fraction: float
    token_layer_bytes: int

    def __post_init__(self) -> None:
        if not 0 <= self.cached_fraction <= 1:
            raise ValueError(f"cached_fraction {self.cached_fraction} is not in [0, 1]")
        if self.num_layers < 1 or self.num_tokens < 1 or self.token_layer_bytes < 1:
            raise ValueError("num_layers, num_tokens and token_layer_bytes are above 0")
        if self.full_compute_s < 0:
            raise ValueError(f"full_compute_s {self.full_compute_s} is negative")

    def compute_layer_s(self) -> float:
        """Return seconds to compute one layer: ``T_F (1 - r) / N`` (BanaServe Eq. 12, corrected).

        The attention of the computed tokens over the fetched ones is left out, so the true value is
        somewhat higher.
        """
        return self.full_compute_s * (1 - self.cached_fraction) / self.num_layers

    def fetch_layer_s(self, bytes_per_s: float) -> float:
        """Return seconds to fetch one layer: ``S_kv L r / B`` (BanaServe Eq. 13)."""
        return self._layer_bytes() * self.cached_fraction / bytes_per_s

    def store_layer_s(self, bytes_per_s: float) -> float:
        """Return seconds to store one layer: ``S_kv L (1 - r) / B`` (Eq. 13, other direction)."""
        return self._layer_bytes() * (1 - self.cached_fraction) / bytes_per_s

    def hides(self, bytes_per_s: float) -> bool:
        """Return whether Eq. 13 is below Eq. 12: a layer is fetched while the last one computes."""
        return self.fetch_layer_s(bytes_per_s) < self.compute_layer_s()

    def break_even_bytes_per_s(self) -> float:
        """Return the bandwidth at which Eq. 12 equals Eq. 13: ``N S_kv L r / (T_F (1 - r))``.

        Raises:
            ValueError: Nothing is computed, so no bandwidth is enough.
        """
        compute_s = self.full_compute_s * (1 - self.cached_fraction)
        if compute_s <= 0:
            raise ValueError("nothing is computed: no transfer can hide")
        return self.num_layers * self._layer_bytes() * self.cached_fraction / compute_s

    def _layer_bytes(self) -> float:
        return float(self.token_layer_bytes * self.num_tokens)


@dataclass(frozen=True, slots=True)
class PipelineTimeline:
    """Times of a three-stage pipeline, in seconds from its start.

    Attributes:
        end_s: End of the last stage of the last layer.
        fetch_wait_s: Total time that computing waited for fetches.
        store_wait_s: Time that storing went on after the last layer was computed.
    """

    end_s: float
    fetch_wait_s: float
    store_wait_s: float


def pipeline(
    fetch_s: Sequence[float], compute_s: Sequence[float], store_s: Sequence[float]
) -> PipelineTimeline:
    """Run the three stages over all layers: fetch i+1 while i computes while i-1 is stored.

    Args:
        fetch_s: Seconds of each layer's fetch; one layer is fetched at a time.
        compute_s: Seconds of each layer's computation, which begins when the layer is fetched.
        store_s: Seconds of each layer's store, which begins when the layer is computed.
    """
    fetched = computed = stored = wait_s = 0.0
    for fetch, compute, store in zip(fetch_s, compute_s, store_s, strict=True):
        fetched += fetch
        wait_s += max(0.0, fetched - computed)
        computed = max(fetched, computed) + compute
        stored = max(stored, computed) + store
    return PipelineTimeline(max(computed, stored), wait_s, max(0.0, stored - computed))


def hidden_fraction(transfer_s: float, visible_s: float) -> float:
    """Return the share of ``transfer_s`` that nothing waited for, in [0, 1]; 1 if nothing moves."""
    if transfer_s <= 0:
        return 1.0
    return min(1.0, max(0.0, 1 - visible_s / transfer_s))
