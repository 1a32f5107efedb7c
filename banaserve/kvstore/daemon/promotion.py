"""Choice of blocks to fetch from tiers instead of letting the client compute them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_DECAY = 0.95
"""Weight of what was learnt before one more sample: half of it is forgotten after 14."""
_LEAST_SPREAD = 0.05
"""Below this relative spread of sizes, latency and bandwidth cannot be told apart."""


class TierSpeed:
    """Speed of loads from one tier, learnt from those that ended.

    A load is taken to need a latency plus a time for each byte that was queued in the tier when it
    began, its own included. Both come from a least squares fit in which samples fade away.
    """

    def __init__(self) -> None:
        self._weight = 0.0
        self._bytes = 0.0
        self._seconds = 0.0
        self._bytes_bytes = 0.0
        self._bytes_seconds = 0.0

    @property
    def is_known(self) -> bool:
        """Whether a load has ended yet."""
        return self._weight > 0

    def learn(self, queued_bytes: int, seconds: float) -> None:
        """A load that began with ``queued_bytes`` to do, its own included, took ``seconds``."""
        self._weight = _DECAY * self._weight + 1
        self._bytes = _DECAY * self._bytes + queued_bytes
        self._seconds = _DECAY * self._seconds + seconds
        self._bytes_bytes = _DECAY * self._bytes_bytes + queued_bytes * queued_bytes
        self._bytes_seconds = _DECAY * self._bytes_seconds + queued_bytes * seconds

    def predict_s(self, queued_bytes: int) -> float:
        """Seconds until ``queued_bytes`` are loaded; 0.0 while nothing is known."""
        latency_s, byte_s = self._fit()
        return latency_s + byte_s * queued_bytes

    def _fit(self) -> tuple[float, float]:
        if not self.is_known:
            return 0.0, 0.0
        mean_bytes, mean_s = self._bytes / self._weight, self._seconds / self._weight
        variance = self._bytes_bytes / self._weight - mean_bytes**2
        if variance > (_LEAST_SPREAD * mean_bytes) ** 2:
            byte_s = (self._bytes_seconds / self._weight - mean_bytes * mean_s) / variance
            latency_s = mean_s - byte_s * mean_bytes
            if byte_s > 0 and latency_s > 0:
                return latency_s, byte_s
        return 0.0, mean_s / mean_bytes


class TierOffer(NamedTuple):
    """One tier at the moment of a decision.

    Attributes:
        speed: Of its loads.
        queued_bytes: Of loads that it has not finished.
    """

    speed: TierSpeed
    queued_bytes: int


class Choice(NamedTuple):
    """How many blocks of a run to fetch, and when the last of them is predicted to be there."""

    num_blocks: int
    fetch_s: float


def choose(
    sources: Sequence[int],
    offers: Sequence[TierOffer],
    block_bytes: int,
    compute_block_s: float,
    wait_s: float = 0.0,
) -> Choice:
    """The number of blocks from the front of a run whose fetching saves most time.

    Fetching n blocks saves computing n blocks and costs waiting for the slowest tier among theirs;
    tiers work side by side. All are fetched where ``compute_block_s`` is 0.0, which means unknown.

    Args:
        sources: For each block of the run the index in ``offers`` of the tier it would come from.
        offers: The tiers.
        block_bytes: Of each block.
        compute_block_s: Of each block.
        wait_s: What the client waits for anyway, because of blocks before the run.
    """
    queued = [offer.queued_bytes for offer in offers]
    best, best_saving_s = Choice(0, wait_s), 0.0
    fetch_s = wait_s
    for number, source in enumerate(sources, 1):
        queued[source] += block_bytes
        fetch_s = max(fetch_s, offers[source].speed.predict_s(queued[source]))
        saving_s = number * compute_block_s - (fetch_s - wait_s)
        if saving_s > best_saving_s or not compute_block_s:
            best, best_saving_s = Choice(number, fetch_s), saving_s
    return best
