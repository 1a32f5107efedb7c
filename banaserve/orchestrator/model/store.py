"""Overlap of the store's transfers with computing: BanaServe Eqs. 12, 13 and 17.

The corrected forms are ``banaserve.kvstore.overlap.Prefill``. Here are the published Eq. 12, kept
to show where it errs, and the time of a prefill whose prefix is fetched.
"""

from __future__ import annotations

from banaserve.kvstore.overlap import Prefill, pipeline


def published_compute_layer_s(prefill: Prefill) -> float:
    """BanaServe Eq. 12 as printed: T_F r / N.

    Wrong but for r = 1/2, the paper's example: it takes the hits for what is computed.
    """
    return prefill.full_compute_s * prefill.cached_fraction / prefill.num_layers


def published_break_even_bytes_per_s(prefill: Prefill) -> float:
    """The bandwidth at which Eq. 12 as printed equals Eq. 13: N S_kv L / T_F, whatever r is."""
    layer_bytes = prefill.token_layer_bytes * prefill.num_tokens
    return prefill.num_layers * layer_bytes / prefill.full_compute_s


def prefill_s(prefill: Prefill, fetch_bytes_per_s: float, store_bytes_per_s: float) -> float:
    """Seconds of a prefill whose cached part is fetched layer by layer while it computes.

    A pipeline over the layers, not Eq. 17's assumption that everything hides.
    """
    layers = prefill.num_layers
    return pipeline(
        [prefill.fetch_layer_s(fetch_bytes_per_s)] * layers,
        [prefill.compute_layer_s()] * layers,
        [prefill.store_layer_s(store_bytes_per_s)] * layers,
    ).end_s
