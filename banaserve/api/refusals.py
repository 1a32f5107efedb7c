"""Refusals of the front door: counted, and logged at most once a second for each cause."""

from __future__ import annotations

import logging
from time import monotonic

from prometheus_client import Counter

_REFUSED = Counter("banaserve_front_refusals", "Requests refused at the front door", ["cause"])
_QUIET_S = 1.0
_MAX_SHOWN_CHARS = 200

logger = logging.getLogger(__name__)


class RefusalCount:
    """Counts refusals by cause; of many in a second one is logged."""

    def __init__(self) -> None:
        self._logged_at_s: dict[str, float] = {}
        self._num_unsaid: dict[str, int] = {}

    def add(self, cause: str, why: str) -> None:
        """Count one.

        Args:
            cause: One of a few words: it is a label.
            why: For the log.
        """
        _REFUSED.labels(cause).inc()
        now_s = monotonic()
        if now_s - self._logged_at_s.get(cause, -_QUIET_S) < _QUIET_S:
            self._num_unsaid[cause] = self._num_unsaid.get(cause, 0) + 1
            return
        self._logged_at_s[cause] = now_s
        more = self._num_unsaid.pop(cause, 0)
        unsaid = f" ({more} more since the last line)" if more else ""
        logger.warning("refused: %s%s", why[:_MAX_SHOWN_CHARS], unsaid)
