"""Equations of BanaServe that no policy computes, beside the corrected forms that policies use.

Oracles of the tests: they prove where an equation is wrong as printed, and that its corrected form
has the published examples as cases.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from banaserve.orchestrator.control.model.moving import Link
from benchmarks.drivers.layer_pipeline import Prefill, pipeline

Key = TypeVar("Key")


def llama_layer_weights(hidden_size: int, mlp_size: int, num_heads: int, num_kv_heads: int) -> int:
    """Parameters of a Llama decoder layer: Q, K, V, O, gate, up, down and two RMS norms."""
    kv_size = hidden_size // num_heads * num_kv_heads
    attention = 2 * hidden_size * hidden_size + 2 * hidden_size * kv_size
    return attention + 3 * hidden_size * mlp_size + 2 * hidden_size


def opt_layer_weights(hidden_size: int, mlp_size: int) -> int:
    """Parameters of an OPT decoder layer: Q, K, V, O, two MLP matrices, biases, two norms."""
    attention = 4 * (hidden_size * hidden_size + hidden_size)
    mlp = 2 * hidden_size * mlp_size + mlp_size + hidden_size
    return attention + mlp + 4 * hidden_size


def crossover_tokens(layer_weight_bytes: int, layer_token_bytes: int) -> float:
    """Cached tokens above which a layer's KV outweighs its weights.

    The paper says with Eq. 4 that weights dominate in most cases. On a loaded decode instance of
    a 13B model they do not: the two are equal at about 30,700 tokens.
    """
    return layer_weight_bytes / layer_token_bytes


def memory_bytes(
    fixed_bytes: int, num_layers: int, layer_weight_bytes: int, kv_tokens: int, token_bytes: int
) -> int:
    """Memory footprint M_0 + n M_l + K (BanaServe Eqs. 23 and 25), K spelled out.

    The paper leaves K a constant; it is ``kv_tokens`` (batch times length) of the layers held.

    Args:
        token_bytes: KV of one token over those ``num_layers``.
    """
    return fixed_bytes + num_layers * layer_weight_bytes + kv_tokens * token_bytes


def layers_bytes(
    num_layers: int, layer_weight_bytes: int, layer_token_bytes: int, kv_tokens: int
) -> int:
    """Payload of whole layers: S_w + S_kv of each (BanaServe Eq. 3)."""
    return num_layers * (layer_weight_bytes + kv_tokens * layer_token_bytes)


def heads_bytes(
    num_layers: int, num_heads: int, num_kv_heads: int, layer_token_bytes: int, kv_tokens: int
) -> int:
    """Payload of ``num_heads`` of ``num_kv_heads`` KV heads: S_kv of BanaServe Eq. 11."""
    return num_layers * kv_tokens * layer_token_bytes * num_heads // num_kv_heads


def live_stall_s(
    weight_bytes: float, kv_bytes: float, dirty_bytes_per_s: float, link: Link, rounds: int = 3
) -> float:
    """Seconds that a live migration stops its host: the KV written in the last round of copies.

    Not in the paper, whose Eq. 4 is the whole copy. Weights never change, so round 1 carries
    weights and KV, each later one what was written meanwhile; the last is copied while stopped.

    Raises:
        ValueError: KV is written as fast as it is copied, so the rounds do not shrink.
    """
    if dirty_bytes_per_s >= link.bytes_per_s:
        raise ValueError("KV is written as fast as the link copies it")
    left_bytes = (weight_bytes + kv_bytes) * dirty_bytes_per_s / link.bytes_per_s
    for _ in range(rounds - 1):
        left_bytes *= dirty_bytes_per_s / link.bytes_per_s
    return link.transfer_s(min(left_bytes, kv_bytes)) + link.sync_s


def break_even_fraction(prefill: Prefill, bytes_per_s: float) -> float:
    """The cached fraction up to which a fetch hides (BanaServe Eq. 17, corrected).

    ``r* = k / (1 + k)`` with ``k = T_F B / (N S_kv L)``.
    """
    layers_bytes = prefill.num_layers * prefill.token_layer_bytes * prefill.num_tokens
    k = prefill.full_compute_s * bytes_per_s / layers_bytes
    return k / (1 + k)


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


@dataclass(frozen=True, slots=True)
class Latency:
    """Times of one request as its client saw them.

    Attributes:
        ttft_s: From sending it to its first token.
        tpot_s: Mean time between two tokens after the first.
        output_tokens: One or more.
    """

    ttft_s: float
    tpot_s: float
    output_tokens: int

    @property
    def end_to_end_s(self) -> float:
        """T_TTFT + (n_out - 1) T_TPOT: the first token has no time of its own."""
        return self.ttft_s + (self.output_tokens - 1) * self.tpot_s


def mean_latency_s(requests: Sequence[Latency]) -> float:
    """Mean end-to-end latency (BanaServe Eq. 19, corrected).

    Printed as 1/N sum T_TTFT + T_TPOT: no parentheses, and one token's time for all of them.

    Raises:
        ValueError: There are no requests.
    """
    if not requests:
        raise ValueError("there is no mean of no requests")
    return sum(request.end_to_end_s for request in requests) / len(requests)


def ttft_s(prefill_queue_s: float, fetch_s: float, prefill_s: float) -> float:
    """Time to the first token (BanaServe Eqs. 20 and 21, corrected): T_q + T_fetch + T_p.

    Printed with the queue before decode. The first token comes from prefill, so the queue is the
    prefill instance's; the fetch is that of the cached prefix, T_p the time of the misses.
    """
    return prefill_queue_s + fetch_s + prefill_s


def first_gap_s(handover_s: float, decode_queue_s: float, step_s: float) -> float:
    """Time from the first token to the second: what Eq. 20 wrongly counts in the TTFT."""
    return handover_s + decode_queue_s + step_s


def tpot_s(
    flops: float,
    flops_per_s: float,
    weight_bytes: float,
    kv_bytes: float,
    memory_bytes_per_s: float,
    overhead_s: float = 0.0,
) -> float:
    """Time of one decode step (BanaServe Eq. 22, corrected).

    Printed as compute + cache access + bandwidth stall, which counts reading memory twice and
    adds what overlaps: max(compute, bytes / bandwidth) + overheads.

    Args:
        flops: Of the whole batch in this step.
        weight_bytes: Read once a step.
        kv_bytes: Of all contexts in the batch.
    """
    return max(flops / flops_per_s, (weight_bytes + kv_bytes) / memory_bytes_per_s) + overhead_s


def closed_loop_tokens_per_s(num_requests: int, latency: Latency) -> float:
    """Throughput of N clients that each wait for their answer (BanaServe Eq. 30, corrected).

    N L_out / (T_TTFT + (L_out - 1) T_TPOT), printed with L_out. It is an identity of a closed
    loop: of open arrivals below saturation, throughput is their rate times their length.
    """
    return num_requests * latency.output_tokens / latency.end_to_end_s


def prefill_flops(num_layers: int, layer_token_flops: float, tokens: int) -> float:
    """Work of a prefill: n_p C_l B_sz L_in, without attention (BanaServe Eq. 24).

    Args:
        tokens: B_sz L_in, the tokens that are computed; cached ones are not.
    """
    return num_layers * layer_token_flops * tokens


def decode_step_flops(num_layers: int, layer_token_flops: float, batch: int) -> float:
    """Work of one decode step: n_d C_l B_sz (BanaServe Eq. 26, corrected).

    Printed with L_gen, the work of a whole generation, which no interval of Eq. 27 contains.
    """
    return num_layers * layer_token_flops * batch


def attention_flops(num_layers: int, hidden_size: int, computed: int, context: int) -> float:
    """Work that Eqs. 24 and 26 leave out: scores and values of ``computed`` tokens over a context.

    4 d_model for each pair (two products of a multiply and an add); in a causal prefill of n
    tokens the mean context is n / 2.
    """
    return 4.0 * num_layers * hidden_size * computed * context


def compute_utilisation(flops: float, flops_per_s: float, interval_s: float) -> float:
    """Share of the possible work that was done (BanaServe Eq. 27, corrected), at most 1.

    Printed as Comp / C_gpu, which is seconds; divided by the interval it is a share.
    """
    if flops_per_s <= 0 or interval_s <= 0:
        raise ValueError("flops_per_s and interval_s are above 0")
    return min(1.0, flops / (flops_per_s * interval_s))


def overloaded(loads: Mapping[Key, float], delta: float) -> list[Key]:
    """{d | load[d] - min(load) > delta} (BanaServe Eq. 33), in the order of ``loads``."""
    lowest = min(loads.values(), default=0.0)
    return [key for key, load in loads.items() if load - lowest > delta]


def underloaded(loads: Mapping[Key, float], delta: float) -> list[Key]:
    """{d | max(load) - load[d] > delta} (BanaServe Eq. 33); may share members with the other."""
    highest = max(loads.values(), default=0.0)
    return [key for key, load in loads.items() if highest - load > delta]


def worst(loads: Mapping[Key, float]) -> float:
    """The objective max_g U_g (BanaServe Eq. 1); 0 of no loads."""
    return max(loads.values(), default=0.0)


def mean(loads: Mapping[Key, float]) -> float:
    """U_avg of BanaServe Eq. 19: to report, not to maximise.

    Migration only moves work, so it hardly changes the mean: Eq. 18 pulls against Eq. 1.
    """
    return sum(loads.values()) / len(loads) if loads else 0.0


@dataclass(frozen=True, slots=True)
class Objective:
    """BanaServe Eqs. 18 and 31, made to have one unit: alpha U - beta T + gamma Theta.

    The paper adds a share, seconds and tokens a second without weights; each term is divided by
    what it is compared with. The migration policy does not use it (nor does Algorithm 1); it
    ranks whole runs.

    Attributes:
        latency_s: A latency that counts as 1.
        tokens_per_s: A throughput that counts as 1.
    """

    latency_s: float
    tokens_per_s: float
    alpha: float = 1.0
    beta: float = 1.0
    gamma: float = 1.0

    def value(self, utilisation: float, latency_s: float, tokens_per_s: float) -> float:
        return (
            self.alpha * utilisation
            - self.beta * latency_s / self.latency_s
            + self.gamma * tokens_per_s / self.tokens_per_s
        )
