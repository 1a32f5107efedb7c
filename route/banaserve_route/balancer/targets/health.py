"""Health probes of replicas, and reads of the load that the replicas report."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import NamedTuple

from msgspec import structs

from banaserve.base.net.sockets import is_own_fault
from banaserve_route.balancer.config import HealthSettings
from banaserve_route.balancer.http.replica_connection import ConnectionPool, ReplicaConnection
from banaserve_route.balancer.http.response import ResponseHead
from banaserve_route.balancer.targets.target import Target
from banaserve_route.policies.fleet import Fleet, Report

MAX_ANSWER_BYTES = 4 * 1024 * 1024
_GAUGES = re.compile(
    rb"^(vllm:num_requests_waiting|sglang:num_queue_reqs|vllm:num_requests_running|"
    rb"sglang:num_running_reqs|vllm:kv_cache_usage_perc|sglang:token_usage)"
    rb"(?:\{[^}\n]*\})?[ ]+([0-9.eE+\-]{1,32})[ ]*$",
    re.MULTILINE,
)
_STEPS = re.compile(
    rb"^vllm:iteration_tokens_total_count(?:\{[^}\n]*\})?[ ]+([0-9.eE+]{1,32})[ ]*$", re.MULTILINE
)
_LOAD_LINES = (
    b"vllm:num_requests_", b"vllm:kv_cache_usage_perc", b"vllm:iteration_tokens_total_count",
    b"sglang:num_", b"sglang:token_usage",
)  # fmt: skip
"""Beginnings of the lines that the patterns match: on a whole page they take ten times as long."""
_WAITING = (b"vllm:num_requests_waiting", b"sglang:num_queue_reqs")
_RUNNING = (b"vllm:num_requests_running", b"sglang:num_running_reqs")
_MAX_REQUESTS = 10**6


class Prober:
    """Periodic probes of one replica: its health, and its load if that is read.

    Attributes:
        health: Intervals, timeouts and other settings of the probes.
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
        self._seen: tuple[float, ...] = ()
        self._step_s: float | None = None

    def start(self) -> None:
        health, name = self.health, self._target.name
        self._repeat(self.look, health.interval_s, f"looking at {name}")
        if self._reads_reports:
            self._repeat(self._read, health.report_interval_s, f"reading the load of {name}")

    def _repeat(self, step: Callable[[], Awaitable[None]], interval_s: float, what: str) -> None:
        loop = asyncio.get_running_loop()
        self._tasks.append(loop.create_task(run_periodically(step, interval_s, self._log, what)))

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def look(self) -> None:
        """Probe the replica's health once."""
        target, health = self._target, self.health
        try:
            answer = await fetch(target.pool, "GET", health.path, target.fields, health.timeout_s)
            is_well = answer.status == 200
            target.complaint = f"answers {answer.status} to {health.path}"
            if is_well:
                self._fleet.measured_round_trip(target.view.id, answer.took_ms)
        except OSError as error:
            if is_own_fault(error):
                return
            is_well = False
            target.complaint = f"does not answer: {error.strerror or str(error) or 'timed out'}"
            target.was_refused |= isinstance(error, ConnectionRefusedError)
        now_s = monotonic()
        # A replica restarts also if fewer probes than ``failures`` find its port closed.
        if target.looked(is_well, health.failures, now_s) or (is_well and target.was_refused):
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
        lines = load_lines(answer.body)
        report = read_report(lines, asked_s) if answer.status == 200 else None
        if report is not None:
            if (dated := self._dated(report, count_steps(lines))) is not None:
                self._fleet.reported(target.view.id, dated)
            self._on_report()

    def _dated(self, report: Report, num_steps: float | None) -> Report | None:
        """Return ``report`` with the engine's own time; None if no step has ended since the last.

        An engine sets its gauges at the end of a step, and counts the requests that had come before
        the step began: before the end of the previous step, which the last new page showed. A step
        without output, as after all requests were aborted, sets the gauges and is not counted.
        """
        if num_steps is None:
            return report
        seen = (num_steps, report.pending, report.running, report.kv_used_fraction)
        if seen == self._seen:
            return None
        began_s, self._step_s, self._seen = self._step_s, report.at_s, seen
        return report if began_s is None else structs.replace(report, at_s=began_s)


def load_lines(page: bytes) -> bytes:
    """Return the lines of a metrics page that may say something of the load."""
    return b"\n".join([line for line in page.split(b"\n") if line.startswith(_LOAD_LINES)])


def read_report(page: bytes, at_s: float) -> Report | None:
    """Return the load on a metrics page of vLLM or SGLang, engines summed; None without load."""
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


def count_steps(page: bytes) -> float | None:
    """Return how many steps the engines of a metrics page have taken; None if it has no count."""
    found = _STEPS.findall(page)
    try:
        return sum(map(float, found)) if found else None
    except ValueError:
        return None


async def run_periodically(
    step: Callable[[], Awaitable[None]],
    interval_s: float,
    log: Callable[[str], None],
    what: str,
) -> None:
    """Run ``step`` every ``interval_s`` until cancelled, whatever exception it raises.

    These tasks are not awaited: without this, one unexpected exception would end the probes of a
    replica for good and silently. A step that fails again with the same message is not logged
    again.
    """
    complaint = ""
    while True:
        began_s = monotonic()
        try:
            await step()
            complaint = ""
        except Exception as error:
            if (words := f"{what} failed: {error!r}") != complaint:
                complaint = words
                log(words)
        await asyncio.sleep(max(0.0, interval_s - (monotonic() - began_s)))


class ProbeAnswer(NamedTuple):
    """Answer, with the time that it took on an open connection, in milliseconds."""

    status: int
    body: bytes
    took_ms: float


async def fetch(
    pool: ConnectionPool, method: str, path: str, fields: bytes, timeout_s: float, body: bytes = b""
) -> ProbeAnswer:
    """Return the answer to one small request.

    A chunked body is returned with its framing, which suffices for reading numbers from it.

    Args:
        fields: Header lines, including Host.

    Raises:
        OSError: There is no answer, or not in time.
    """
    length = b"Content-Length: %d\r\n" % len(body) if method != "GET" else b""
    start = b"%b %b HTTP/1.1\r\n" % (method.encode(), path.encode())
    parts = [start, fields, length, b"\r\n", body]
    async with asyncio.timeout(timeout_s):
        answer = await _try(pool, parts)
        return answer or await _try(pool, parts, is_last=True)  # type: ignore[return-value]


async def _try(
    pool: ConnectionPool, parts: list[bytes], is_last: bool = False
) -> ProbeAnswer | None:
    """Return the answer; None if the connection had been closed while it was idle."""
    upstream = (None if is_last else pool.take()) or await pool.connect()
    started_s = monotonic()
    sink = _Collector(upstream)
    upstream.send(parts, sink, to_head=False)
    try:
        await sink.done
    except BaseException:
        # An answer that comes as the time ends has given the connection to the next request.
        if not sink.is_over:
            upstream.abort()
        if sink.was_reused:
            return None
        raise
    return ProbeAnswer(sink.status, b"".join(sink.parts), (monotonic() - started_s) * 1e3)


class _Collector:
    """Sink that keeps the whole answer."""

    def __init__(self, upstream: ReplicaConnection) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.status = 0
        self.was_reused = self.is_over = False
        self.parts: list[bytes] = []
        self._size = 0
        self._upstream = upstream

    def on_head(self, head: ResponseHead, data: bytes) -> None:
        self.status = head.status
        self.on_body(data)

    def on_body(self, data: bytes) -> None:
        self._size += len(data)
        self.parts.append(data)
        if self._size > MAX_ANSWER_BYTES:
            self._upstream.abort()
            self._fail(f"the answer exceeds {MAX_ANSWER_BYTES} bytes")

    def on_end(self) -> None:
        self.is_over = True
        if not self.done.done():
            self.done.set_result(None)

    def on_broken(self, why: str, was_reused: bool, is_ours: bool = False) -> None:
        self.was_reused, self.is_over = was_reused, True
        self._fail(why)

    def _fail(self, why: str) -> None:
        if not self.done.done():
            self.done.set_exception(ConnectionError(why))
