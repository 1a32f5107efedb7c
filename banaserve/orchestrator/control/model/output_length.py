"""Output lengths of recently ended requests, for predicting those of coming requests."""

from __future__ import annotations

from collections import deque
from itertools import accumulate

from banaserve.base.types import OutputLengths

_KEPT = 256
_EVERY = 8
_SHARES = (0.125, 0.375, 0.625, 0.875)


class OutputLengthWindow:
    """Window of the last output lengths; their summary is renewed every few requests.

    Attributes:
        lengths: Summary of the lengths; None before the first request has ended.
    """

    def __init__(self) -> None:
        self.lengths: OutputLengths | None = None
        self._last: deque[int] = deque(maxlen=_KEPT)
        self._num_new = 0

    def ended(self, tokens: int) -> None:
        """Record that a request has ended with this number of output tokens."""
        if tokens < 1:
            return
        self._last.append(tokens)
        self._num_new += 1
        if self._num_new >= _EVERY or len(self._last) <= _EVERY:
            self._num_new = 0
            self.lengths = _told(sorted(self._last))


def _told(ascending: list[int]) -> OutputLengths:
    sums = [*accumulate(ascending)]
    present = []
    place = 0
    for share in _SHARES:
        while sums[place] < share * sums[-1]:
            place += 1
        present.append(ascending[place])
    arriving = tuple(ascending[int(share * len(ascending))] for share in _SHARES)
    return OutputLengths(sums[-1] / len(ascending), arriving, tuple(present))
