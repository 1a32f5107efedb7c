"""Modelled time of a server: whether it is in use, and how well the machine kept it."""

from __future__ import annotations

import http.client
import urllib.error
from collections import defaultdict

from banaserve.base.clock import WallClock
from banaserve.base.errors import UserError
from banaserve_bench.loadgen.metrics_page import fetch, samples_of
from banaserve_bench.results.result import ModelledTime

MOST_LATE = 0.03
"""Maximum share of steps that may take longer than modelled; above it, times mean nothing."""
_INFO = "banaserve_paced_info"


class StretchedClock:
    """A clock whose second takes ``dilation`` seconds on the wall, as a paced server's does."""

    def __init__(self, dilation: float) -> None:
        self._wall = WallClock()
        self._dilation = dilation

    def now(self) -> float:
        return self._wall.now() / self._dilation

    async def sleep(self, seconds: float) -> None:
        await self._wall.sleep(seconds * self._dilation)


def modelled_time(url: str) -> ModelledTime | None:
    """Return modelled time of the server at ``url``; None if time is real or there are no metrics.

    Raises:
        UserError: The server does not answer.
    """
    try:
        return read(fetch(f"{url}/metrics"))
    except (urllib.error.HTTPError, ValueError):
        return None  # no such page, or one of something else
    except (OSError, http.client.HTTPException) as error:
        raise UserError(f"{url} does not answer: {error}") from error


def read(page: str) -> ModelledTime | None:
    """Return modelled time from a page in Prometheus' text format; None if time is real.

    Raises:
        ValueError: The page is not in that format.
    """
    sums: dict[str, float] = defaultdict(float)
    about: dict[str, str] = {}
    for sample in samples_of(page, "banaserve_paced_"):
        if sample.name == _INFO:
            about = dict(sample.labels)
        sums[sample.name] += sample.value
    if not about:
        return None
    modelled_s = sums["banaserve_paced_modelled_seconds_total"]
    late_s = sums["banaserve_paced_late_seconds_total"]
    return ModelledTime(
        profile=about["profile"],
        source=about["source"],
        dilation=sums["banaserve_paced_dilation"],
        num_steps=int(sums["banaserve_paced_steps_total"]),
        num_overrun=int(sums["banaserve_paced_steps_overrun_total"]),
        late_fraction=late_s / modelled_s if modelled_s else 0.0,
        step_error=about.get("step_error", "unknown"),
    )
