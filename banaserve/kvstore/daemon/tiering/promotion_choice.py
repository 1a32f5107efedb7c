"""Choice of blocks to fetch from tiers instead of letting the client compute them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

_DECAY = 0.95
"""Factor on the weight of older samples at each new sample: it is halved after 14 samples."""
_LEAST_SPREAD = 0.05
"""Relative spread of sizes below which latency and bandwidth cannot be distinguished."""


class TierSpeed:
    """Speed of loads from one tier, learnt from loads that ended.

    The model: a load takes a latency plus a time for each byte that was queued in the tier when
    the load began, including its own bytes. Both come from a least squares fit in which the weight
    of older samples decays.
    """

    def __init__(self) -> None:
        self._weight = 0.0
        self._bytes = 0.0
        self._seconds = 0.0
        self._bytes_bytes = 0.0
        self._bytes_seconds = 0.0

    def learn(self, queued_bytes: int, seconds: float) -> None:
        """Learn from a load: its duration, and the bytes queued at its start, its own included."""
        self._weight = _DECAY * self._weight + 1
        self._bytes = _DECAY * self._bytes + queued_bytes
        self._seconds = _DECAY * self._seconds + seconds
        self._bytes_bytes = _DECAY * self._bytes_bytes + queued_bytes * queued_bytes
        self._bytes_seconds = _DECAY * self._bytes_seconds + queued_bytes * seconds

    def predict_s(self, queued_bytes: int) -> float:
        """Return the seconds until ``queued_bytes`` are loaded; 0.0 before the first load."""
        latency_s, byte_s = self._fit()
        return latency_s + byte_s * queued_bytes

    def _fit(self) -> tuple[float, float]:
        if not self._weight:
            return 0.0, 0.0
        mean_bytes, mean_s = self._bytes / self._weight, self._seconds / self._weight
        variance = self._bytes_bytes / self._weight - mean_bytes**2
        if variance > (_LEAST_SPREAD * mean_bytes) ** 2:
            byte_s = (self._bytes_seconds / self._weight - mean_bytes * mean_s) / variance
            latency_s = mean_s - byte_s * mean_bytes
            if byte_s > 0 and latency_s > 0:
                return latency_s, byte_s
        return 0.0, mean_s / mean_bytes


def choose(
    sources: Sequence[int],
    tiers: Sequence[tuple[TierSpeed, int]],
    block_bytes: int,
    compute_block_s: float,
    wait_s: float = 0.0,
) -> int:
    """Return the number of blocks from the front of a run whose fetching saves most time.

    Fetching n blocks saves computing n blocks and costs waiting for the slowest of their tiers;
    tiers work in parallel. All are fetched if ``compute_block_s`` is 0.0, which means unknown.

    Args:
        sources: Index in ``tiers`` of the source tier of each block of the run.
        tiers: Speed of each tier's loads, and bytes of the loads that the tier has not finished.
        block_bytes: Size of each block.
        wait_s: Time that the client waits anyway for blocks before the run, in seconds.
    """
    queued = [queued_bytes for _, queued_bytes in tiers]
    best, best_saving_s = 0, 0.0
    fetch_s = wait_s
    for number, source in enumerate(sources, 1):
        queued[source] += block_bytes
        fetch_s = max(fetch_s, tiers[source][0].predict_s(queued[source]))
        saving_s = number * compute_block_s - (fetch_s - wait_s)
        if saving_s > best_saving_s or not compute_block_s:
            best, best_saving_s = number, saving_s
    return best
