"""Refusals of the front door: counted, and logged at most once a second for each cause."""

from __future__ import annotations

import logging
from time import monotonic

from prometheus_client import Counter

from banaserve.log_limit import LogLimit

_REFUSED = Counter("banaserve_front_refusals", "Requests refused at the front door", ["cause"])

logger = logging.getLogger(__name__)


class RefusalCount:
    """Counts refusals by cause; of many in a second one is logged."""

    def __init__(self) -> None:
        self._limit = LogLimit()

    def add(self, cause: str, why: str) -> None:
        """Count one.

        Args:
            cause: One of a few words: it is a label.
            why: For the log.
        """
        _REFUSED.labels(cause).inc()
        if (line := self._limit.line(cause, why, monotonic())) is not None:
            logger.warning("refused: %s", line)
