"""Looks at replicas: whether they are there, and what they say of their load."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from time import monotonic

from banaserve.balancer.fetch import fetch
from banaserve.balancer.rounds import over_and_over
from banaserve.balancer.settings import HealthSettings
from banaserve.balancer.target import Target
from banaserve.orchestrator.replicas.fleet import Fleet, Report

_GAUGES = re.compile(
    rb"^(vllm:num_requests_waiting|sglang:num_queue_reqs|vllm:num_requests_running|"
    rb"sglang:num_running_reqs|vllm:kv_cache_usage_perc|sglang:token_usage)"
    rb"(?:\{[^}\n]*\})?[ ]+([0-9.eE+\-]{1,32})[ ]*$",
    re.MULTILINE,
)
_WAITING = (b"vllm:num_requests_waiting", b"sglang:num_queue_reqs")
_RUNNING = (b"vllm:num_requests_running", b"sglang:num_running_reqs")
_MAX_REQUESTS = 10**6


def read_report(page: bytes, at_s: float) -> Report | None:
    """Returns what a metrics page of vLLM or SGLang says, engines summed; None where nothing."""
    waiting = running = 0.0
    used: list[float] = []
    found = False
    for name, digits in _GAUGES.findall(page):
        try:
            value = float(digits)
        except ValueError:
            continue
        if not 0 <= value <= _MAX_REQUESTS:
            continue
        found = True
        if name in _WAITING:
            waiting += value
        elif name in _RUNNING:
            running += value
        else:
            used.append(min(value, 1.0))
    if not found:
        return None
    return Report(at_s, int(waiting), int(running), max(used, default=0.0))


class Prober:
    """Looks at one replica as long as it runs.

    Attributes:
        health: How often and how long.
    """

    def __init__(
        self,
        target: Target,
        fleet: Fleet,
        health: HealthSettings,
        on_change: Callable[[Target], None],
        on_report: Callable[[], None],
        log: Callable[[str], None],
        reads_reports: bool,
    ) -> None:
        self._target, self._fleet, self.health = target, fleet, health
        self._on_change, self._on_report, self._log = on_change, on_report, log
        self._reads_reports = reads_reports
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        health, name = self.health, self._target.name
        self._repeat(self.look, health.interval_s, f"looking at {name}")
        if self._reads_reports:
            self._repeat(self._read, health.report_interval_s, f"reading the load of {name}")

    def _repeat(self, step: Callable[[], Awaitable[None]], interval_s: float, what: str) -> None:
        loop = asyncio.get_running_loop()
        self._tasks.append(loop.create_task(over_and_over(step, interval_s, self._log, what)))

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def look(self) -> None:
        """Look at the replica's health once."""
        target, health = self._target, self.health
        try:
            answer = await fetch(target.pool, "GET", health.path, target.fields, health.timeout_s)
            is_well = answer.status == 200
            if is_well:
                self._fleet.measured_round_trip(target.view.id, answer.took_ms)
        except OSError as error:
            is_well = False
            target.was_refused |= isinstance(error, ConnectionRefusedError)
        now_s = monotonic()
        if target.looked(is_well, health.failures, now_s):
            self._on_change(target)

    async def _read(self) -> None:
        target, health = self._target, self.health
        if not target.is_healthy:
            return
        asked_s = monotonic()
        try:
            answer = await fetch(target.pool, "GET", "/metrics", target.fields, health.timeout_s)
        except OSError:
            return
        report = read_report(answer.body, asked_s) if answer.status == 200 else None
        if report is not None:
            self._fleet.reported(target.view.id, report)
            self._on_report()
