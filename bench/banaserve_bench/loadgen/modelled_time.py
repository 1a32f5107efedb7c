"""Modelled time of a server: whether it is in use, and how well the machine kept it."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

from banaserve.base.clock import WallClock
from banaserve.base.errors import UserError
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
        with urllib.request.urlopen(f"{url}/metrics", timeout=30) as page:
            return read(page.read().decode())
    except (urllib.error.HTTPError, ValueError):
        return None  # no such page, or one of something else
    except (OSError, http.client.HTTPException) as error:
        raise UserError(f"{url} does not answer: {error}") from error


def read(page: str) -> ModelledTime | None:
    """Return modelled time from a page in Prometheus' text format; None if time is real.

    Raises:
        ValueError: The page is not in that format.
    """
    sums: dict[str, float] = {}
    about: dict[str, str] = {}
    for family in text_string_to_metric_families(page):
        if not family.name.startswith("banaserve_paced_"):
            continue
        for sample in family.samples:
            if sample.name == _INFO:
                about = dict(sample.labels)
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    if not about:
        return None
    modelled_s = sums.get("banaserve_paced_modelled_seconds_total", 0.0)
    late_s = sums.get("banaserve_paced_late_seconds_total", 0.0)
    return ModelledTime(
        profile=about["profile"],
        source=about["source"],
        dilation=sums["banaserve_paced_dilation"],
        num_steps=int(sums.get("banaserve_paced_steps_total", 0)),
        num_overrun=int(sums.get("banaserve_paced_steps_overrun_total", 0)),
        late_fraction=late_s / modelled_s if modelled_s else 0.0,
        step_error=about.get("step_error", "unknown"),
    )
