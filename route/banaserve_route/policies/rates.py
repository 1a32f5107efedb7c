"""Cost of a token, learnt from times to first token."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

_EVERY = 16
"""Number of samples between two fits: a fit costs as much as a decision."""


class Rates:
    """Online fit of time to first token = base + p x uncached + q x backlog, in milliseconds.

    Weighted least squares: the weight of a sample falls by the factor ``memory`` with each later
    sample, so that the fit adapts. It starts from assumed rates with the weight of ``prior``
    samples, which falls with every measured one. No rate is ever negative: terms whose rate would
    be negative are left out of the fit.
    """

    def __init__(
        self, prefill_ms: float, queue_ms: float, memory: float = 0.998, prior: float = 20.0
    ) -> None:
        """Start from ``prefill_ms`` and ``queue_ms`` per token, and a base of 0."""
        self.prefill_ms, self.queue_ms, self.base_ms = prefill_ms, queue_ms, 0.0
        self.num_samples = 0
        self._memory = memory
        # The prior: samples of 1000 uncached and 1000 backlog tokens, at the assumed rates.
        self._assumed = (prefill_ms, queue_ms)
        self._prior = prior * 1e6
        self._squares = [[0.0] * 3 for _ in range(3)]
        self._products = [0.0] * 3

    def learn(self, uncached: float, backlog: float, milliseconds: float) -> None:
        """Add one measured time to first token, without the round trip."""
        row = (1.0, uncached, backlog)
        for i in range(3):
            for j in range(3):
                self._squares[i][j] = self._memory * self._squares[i][j] + row[i] * row[j]
            self._products[i] = self._memory * self._products[i] + row[i] * milliseconds
        self.num_samples += 1
        if self.num_samples < _EVERY or self.num_samples % _EVERY == 0:
            self._fit()

    def state(self) -> list[float]:
        """Return the state of the fit, as 13 numbers."""
        return [float(self.num_samples), *chain(*self._squares), *self._products]

    def restore(self, numbers: Sequence[float]) -> None:
        """Restore the state that ``state`` returned."""
        self.num_samples = int(numbers[0])
        self._squares = [list(numbers[1 + 3 * i : 4 + 3 * i]) for i in range(3)]
        self._products = list(numbers[10:13])
        if self.num_samples:
            self._fit()

    def _fit(self) -> None:
        kept = [0, 1, 2]
        while True:
            found = self._solve(kept)
            negative = [(value, name) for name, value in found.items() if value < 0]
            if not negative:
                break
            kept.remove(min(negative)[1])
        self.base_ms = found.get(0, 0.0)
        self.prefill_ms, self.queue_ms = found.get(1, 0.0), found.get(2, 0.0)

    def _solve(self, kept: Sequence[int]) -> dict[int, float]:
        """Return the coefficients of the terms in ``kept``, by Gaussian elimination."""
        prior = self._prior * max(0.01, 0.99**self.num_samples)
        rows = [[self._squares[i][j] for j in kept] + [self._products[i]] for i in kept]
        for place, name in enumerate(kept):
            if name:
                rows[place][place] += prior
                rows[place][-1] += prior * self._assumed[name - 1]
            else:
                rows[place][place] += 1e-9
        size = len(kept)
        for pivot in range(size):
            for other in range(pivot + 1, size):
                factor = rows[other][pivot] / rows[pivot][pivot]
                rows[other] = [
                    a - factor * b for a, b in zip(rows[other], rows[pivot], strict=True)
                ]
        found: dict[int, float] = {}
        for pivot in reversed(range(size)):
            known = sum(rows[pivot][other] * found[kept[other]] for other in range(pivot + 1, size))
            found[kept[pivot]] = (rows[pivot][-1] - known) / rows[pivot][pivot]
        return found
