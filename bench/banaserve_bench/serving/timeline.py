"""Load and role of each instance of a server over time."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from banaserve.base.clock import Clock
from banaserve.contracts.control_api import DecisionRecord
from banaserve_bench.loadgen.metrics_page import fetch, samples_of

_EVERY_S = 1.0
_TIMEOUT_S = 10.0
_IN_FLIGHT = "banaserve_requests_in_flight"
_READY = "banaserve_instance_ready"
_BUSY = "banaserve_busy_seconds_total"
_PACED = "banaserve_paced_modelled_seconds_total"
_DILATION = "banaserve_paced_dilation"
_WANTED = (_IN_FLIGHT, _READY, _BUSY, _PACED, _DILATION)
_MOST_POINTS = 40


class InstanceTimeline(msgspec.Struct, forbid_unknown_fields=True):
    """Samples of a server's metrics, in the order of time.

    Attributes:
        at_s: Time of each sample since the start of watching, in seconds.
        in_flight: Number of legs that each instance held at each sample, by instance.
        roles: Role at each sample, by instance; empty if the instance was not ready.
        busy_s: Seconds spent in steps up to each sample, by instance; modelled seconds where time
            is modelled; 0 if the instance does not count them.
    """

    at_s: list[float] = []
    in_flight: dict[str, list[float]] = {}
    roles: dict[str, list[str]] = {}
    busy_s: dict[str, list[float]] = {}

    def add(self, at_s: float, page: str) -> None:
        """Add a sample from ``page``, which has Prometheus' text format."""
        legs: dict[str, float] = {}
        roles: dict[str, str] = {}
        busy_s: dict[str, float] = {}
        paced_s: dict[str, float] = {}
        dilation = 1.0
        for sample in samples_of(page, *_WANTED):
            name = sample.labels.get("instance_id", "")
            if sample.name == _IN_FLIGHT:
                legs[name] = sample.value
            elif sample.name == _READY and sample.value:
                roles[name] = sample.labels.get("role", "")
            elif sample.name == _PACED:
                paced_s[name] = sample.value
            elif sample.name == _BUSY:
                busy_s[name] = sample.value
            elif sample.name == _DILATION:
                dilation = sample.value
        busy_s |= {name: spent_s / dilation for name, spent_s in paced_s.items()}
        for name in sorted(legs.keys() | roles.keys() | busy_s.keys()):
            # An instance that was absent at earlier samples held nothing then.
            self.in_flight.setdefault(name, [0.0] * len(self.at_s))
            self.roles.setdefault(name, [""] * len(self.at_s))
            self.busy_s.setdefault(name, [0.0] * len(self.at_s))
        self.at_s.append(at_s)
        for name, seen in self.in_flight.items():
            seen.append(legs.get(name, 0.0))
            self.roles[name].append(roles.get(name, ""))
            self.busy_s[name].append(busy_s.get(name, 0.0))

    def utilisation(self) -> dict[str, list[tuple[float, float]]]:
        """Return by instance the share of time in steps, between samples some seconds apart."""
        found = {}
        for name, spent_s in self.busy_s.items():
            if not any(spent_s):
                continue
            looks = list(zip(self.at_s, spent_s, strict=True))
            width = max(1, len(looks) // _MOST_POINTS)
            looks = looks[::width]
            found[name] = [
                (at_s, min(1.0, max(0.0, (spent - before) / (at_s - began_s))))
                for (began_s, before), (at_s, spent) in pairwise(looks)
                if at_s > began_s
            ]
        return found

    def changes(self) -> list[str]:
        """Return a line for each change of an instance's role, with its time."""
        found = []
        for name, roles in self.roles.items():
            for at_s, before, after in zip(self.at_s[1:], roles, roles[1:], strict=False):
                if before and after and before != after:
                    found.append(f"{name} became {after} after {at_s:.0f} s (it was {before})")
        return found


@contextlib.asynccontextmanager
async def watched(url: str, clock: Clock) -> AsyncIterator[InstanceTimeline]:
    """Sample the server at ``url`` once a second until the block ends, ignoring failures.

    Args:
        clock: Clock of the samples' times.
    """
    timeline = InstanceTimeline()
    watcher = asyncio.create_task(_watch(url, timeline, clock))
    try:
        yield timeline
    finally:
        watcher.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watcher


async def _watch(url: str, timeline: InstanceTimeline, clock: Clock) -> None:
    began_s = clock.now()
    while True:
        with contextlib.suppress(OSError, http.client.HTTPException):
            page = await asyncio.to_thread(fetch, f"{url}/metrics", None, _TIMEOUT_S)
            timeline.add(round(clock.now() - began_s, 2), page)
        await asyncio.sleep(_EVERY_S)


def decisions_of(log: Path, began_s: float, dilation: float) -> list[dict[str, Any]]:
    """Return decisions that began steps, each in its last written state, in modelled seconds."""
    if not log.exists():
        return []
    read = (
        msgspec.json.decode(line, type=DecisionRecord) for line in log.read_bytes().splitlines()
    )
    last = {decision.number: decision for decision in read}
    begun = [one for one in last.values() if any(not step.held for step in one.steps)]
    return [
        {
            "at_s": round((one.at_s - began_s) / dilation, 2),
            "gap": round(one.gap, 3),
            "load": {
                name: [round(seen.compute, 3), round(seen.memory, 3)]
                for name, seen in one.instances.items()
            },
            "num_rejected": len(one.rejected),
            "steps": [
                {
                    "what": step.what,
                    "cost_s": step.cost_s / dilation,
                    "benefit_s": step.benefit_s / dilation,
                    "ending": step.result.ending if step.result is not None else "under way",
                    "reason": step.result.reason if step.result is not None else "",
                    "took_s": (step.result.seconds if step.result is not None else 0.0) / dilation,
                }
                for step in one.steps
                if not step.held
            ],
        }
        for one in begun
    ]
