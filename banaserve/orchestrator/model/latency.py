"""Latency and throughput of requests: BanaServe Eqs. 19 to 22 and 30."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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
