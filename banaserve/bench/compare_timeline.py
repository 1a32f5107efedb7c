"""What each instance of a server had to do over time, and which role it had."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import time
import urllib.request
from collections.abc import AsyncIterator

import msgspec
from prometheus_client.parser import text_string_to_metric_families

_EVERY_S = 1.0
_IN_FLIGHT = "banaserve_requests_in_flight"
_READY = "banaserve_instance_ready"


class Timeline(msgspec.Struct, forbid_unknown_fields=True):
    """Looks at a server's metrics, in their order.

    Attributes:
        at_s: Of each look, from the first one.
        in_flight: By instance: legs that it held at each look.
        roles: By instance: its role at each look; empty where it was not ready.
    """

    at_s: list[float] = []
    in_flight: dict[str, list[float]] = {}
    roles: dict[str, list[str]] = {}

    def add(self, at_s: float, page: str) -> None:
        """Adds a look: ``page`` in Prometheus' text format."""
        legs: dict[str, float] = {}
        roles: dict[str, str] = {}
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                name = sample.labels.get("instance_id", "")
                if sample.name == _IN_FLIGHT:
                    legs[name] = sample.value
                elif sample.name == _READY and sample.value:
                    roles[name] = sample.labels.get("role", "")
        for name in sorted(legs.keys() | roles.keys()):
            # One that was not there at the looks before held nothing.
            self.in_flight.setdefault(name, [0.0] * len(self.at_s))
            self.roles.setdefault(name, [""] * len(self.at_s))
        self.at_s.append(at_s)
        for name, seen in self.in_flight.items():
            seen.append(legs.get(name, 0.0))
            self.roles[name].append(roles.get(name, ""))

    def changes(self) -> list[str]:
        """Says in a line each when an instance changed its role."""
        found = []
        for name, roles in self.roles.items():
            for at_s, before, after in zip(self.at_s[1:], roles, roles[1:], strict=False):
                if before and after and before != after:
                    found.append(f"{name} became {after} after {at_s:.0f} s (it was {before})")
        return found


@contextlib.asynccontextmanager
async def watched(url: str) -> AsyncIterator[Timeline]:
    """Looks at the server at ``url`` once a second until the block ends, but for failures."""
    timeline = Timeline()
    watcher = asyncio.create_task(_watch(url, timeline))
    try:
        yield timeline
    finally:
        watcher.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watcher


async def _watch(url: str, timeline: Timeline) -> None:
    began_s = time.monotonic()
    while True:
        with contextlib.suppress(OSError, http.client.HTTPException):
            page = await asyncio.to_thread(_page, url)
            timeline.add(round(time.monotonic() - began_s, 2), page)
        await asyncio.sleep(_EVERY_S)


def _page(url: str) -> str:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        text: str = answer.read().decode()
    return text
