"""Reports of an instance: the work and the time of its steps, as its worker counts them.

They arrive in the statistics that vLLM sends with its outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from banaserve.base.clock import Clock
from banaserve.base.types import BackPressure, InstanceId, InstanceReport
from banaserve.engine.compat.engine import SchedulerStats
from banaserve.orchestrator.control.model.learnt_time import StepWork, fill_fraction, step_time
from banaserve.orchestrator.control.model.overlapping import overlap_fraction
from banaserve.serving.monitoring import metrics
from banaserve.serving.monitoring.gpu_monitor import GpuMeter

SMOOTHING_S = 2.0
_FIRST = step_time(5e-3, 5e-4, 1e-7, 1e-6, 5e-4, doubt=3.0)
"""First guess: a small model on a CPU. The first dozens of steps correct its magnitudes."""
_SEEN_AFTER = 5
"""Number of samples of a kind of work below which its coefficients are still the first guess."""
_FETCH_WEIGHT = 0.1
_WORK = ("prefill_tokens", "prefill_pairs", "decode_requests", "context_tokens")
_LEARNT_AFTER = 20
"""Number of samples below which predictions, such as a step's fill, would be guesswork."""
_ROOM = (
    *("room_prompts", "room_tokens", "room_longest_s"),
    *("room_held_blocks", "room_blocks", "room_block_bytes"),
)
"""Gauges of the connector, sent as changes to be summed, since several steps share a report."""
_COUNT_EVERY_S = 0.05
"""Minimum time between two updates of metrics and of the model of step times, in seconds.

An update costs the front door as much as passing on a token: the short steps of a small model are
counted and learnt from together, longer ones individually.
"""


class _Heard(NamedTuple):
    """Last report of an engine: ``stats`` of its last step; None if it is idle."""

    at_s: float
    stats: SchedulerStats | None


class StepMeter:
    """Meter that smooths a worker's measurements and learns to predict the time of its steps.

    Args:
        full_step_tokens: Maximum number of tokens of one step; 0 if unknown.

    Attributes:
        busy_fraction: Share of wall time spent in steps, in [0, 1].
        step_s: Mean time of a step, in seconds.
        step_tokens: Mean number of tokens in a step.
        model: Predictor of a step's time without waiting for copies.
        remote_calls: Number of round trips to guests in each step at present.
        fetch_block_s: Seconds to fetch a KV block, smoothed over fetches; 0 before the first.
    """

    def __init__(self, full_step_tokens: int, now_s: float) -> None:
        self.busy_fraction = 0.0
        self.step_s = 0.0
        self.step_tokens = 0.0
        self.model = _FIRST
        self.remote_calls = 0
        self.fetch_block_s = 0.0
        self._num_remote_samples = 0
        self._num_prefill_samples = self._num_decode_samples = 0
        self.set_full_step(full_step_tokens)
        self._work = StepWork()
        self._since_s = now_s
        self._owed_s = 0.0

    def set_full_step(self, tokens: int) -> None:
        """Set the maximum number of tokens of one step from now on; 0 if unknown."""
        self._full = StepWork(tokens, tokens**2) if tokens else None

    @property
    def fill_fraction(self) -> float:
        """Fill of the instance's steps, in [0, 1]; 1 until their times have been learnt."""
        if self.model.num_samples < _LEARNT_AFTER or not self.step_s:
            return 1.0
        return fill_fraction(self.model, self._work, self._full)

    @property
    def coefficients(self) -> tuple[float, ...]:
        """Coefficients of a step's time; 0 for hardly measured work; empty until learnt."""
        if self.model.num_samples < _LEARNT_AFTER:
            return ()
        fixed_s, token_s, pair_s, context_s, request_s, call_s = self.model.coefficients
        if self._num_prefill_samples < _SEEN_AFTER:
            token_s = pair_s = 0.0
        if self._num_decode_samples < _SEEN_AFTER:
            context_s = request_s = 0.0
        return fixed_s, token_s, pair_s, context_s, request_s, call_s

    @property
    def call_s(self) -> float | None:
        """Seconds that a round trip to a guest adds to a step; None until learnt."""
        is_learnt = self._num_remote_samples >= _LEARNT_AFTER
        return max(0.0, self.model.coefficients[5]) if is_learnt else None

    def overlap_fraction(self, max_microbatches: int) -> float | None:
        """Return the share of a guest's work that its host would not await; None until learnt."""
        if self.model.num_samples < _LEARNT_AFTER:
            return None
        return overlap_fraction(self.model, self._work, max_microbatches)

    def record(self, counted: Mapping[str, float], now_s: float) -> None:
        """Take the counts since the last call: sums of ``TransferStats``."""
        busy_s = counted.get("busy_seconds", 0.0)
        fetch_s, num_blocks = counted.get("load_seconds", 0.0), counted.get("loaded_blocks", 0.0)
        if num_blocks > 0 and fetch_s > 0:
            weight = _FETCH_WEIGHT if self.fetch_block_s else 1.0
            self.fetch_block_s += weight * (fetch_s / num_blocks - self.fetch_block_s)
        weight = self._smooth_busy(busy_s, now_s)
        steps = counted.get("steps", 0.0)
        if steps <= 0:
            return
        work = StepWork(**{name: counted.get(f"step_{name}", 0.0) / steps for name in _WORK})
        waited_s = counted.get("load_wait_seconds", 0.0) + counted.get("save_wait_seconds", 0.0)
        if (computed_s := busy_s - waited_s) > 0:
            done = replace(work, remote_calls=self.remote_calls)
            self.model = self.model.observed(done.features, computed_s / steps)
            self._num_remote_samples += self.remote_calls > 0
            self._num_prefill_samples += work.prefill_tokens > 0
            self._num_decode_samples += work.decode_requests > 0
        weight = 1.0 if not self.step_s else weight
        self.step_s += weight * (busy_s / steps - self.step_s)
        tokens = work.prefill_tokens + work.decode_requests
        self.step_tokens += weight * (tokens - self.step_tokens)
        self._work = _blended(self._work, work, weight)

    def idle(self, now_s: float) -> None:
        """Record that nothing has run since the last call."""
        self._smooth_busy(0.0, now_s)

    def _smooth_busy(self, busy_s: float, now_s: float) -> float:
        elapsed_s = max(now_s - self._since_s, 1e-6)
        self._since_s = now_s
        # Reports of several steps may be read at once: busy time in excess of the time since the
        # last call belongs to the time before it, and is counted in the next call.
        busy_s += self._owed_s
        counted_s = min(busy_s, elapsed_s)
        self._owed_s = min(busy_s - counted_s, SMOOTHING_S)
        weight = min(1.0, elapsed_s / SMOOTHING_S)
        self.busy_fraction += weight * (counted_s / elapsed_s - self.busy_fraction)
        return weight


def _blended(old: StepWork, new: StepWork, weight: float) -> StepWork:
    pairs = {name: (getattr(old, name), getattr(new, name)) for name in _WORK}
    return StepWork(**{name: was + weight * (now - was) for name, (was, now) in pairs.items()})


class ReportBoard:
    """Board with the last report of one incarnation of an instance.

    Statistics arrive with every step, but reports are read only a few times a second, so a report
    is made when it is read.

    Attributes:
        block_tokens: Tokens per KV block; 0 while unknown.
    """

    def __init__(
        self,
        instance_id: InstanceId,
        clock: Clock,
        full_step_tokens: int = 0,
        gpu: GpuMeter | None = None,
    ) -> None:
        self._id = instance_id
        self._clock = clock
        self.meter = StepMeter(full_step_tokens, clock.now())
        self.block_tokens = 0
        self._gpu = gpu
        self._heard: _Heard | None = None
        self._last: InstanceReport | None = None
        self._uncounted: dict[str, float] = {}
        self._room_wait_s = 0.0
        self._counted_s = float("-inf")
        self._step_error = metrics.STEP_ERROR.labels("step", self._id)
        self._room = dict.fromkeys(_ROOM, 0.0)
        self._num_for_room = metrics.WAITING_FOR_ROOM.labels(self._id)
        self._num_for_room.set(0)

    def record(self, stats: SchedulerStats) -> None:
        """Take the statistics of one step, or of several."""
        uncounted = self._uncounted
        for name, amount in (stats.kv_connector_stats or {}).items():
            uncounted[name] = uncounted.get(name, 0.0) + amount
        now_s = self._clock.now()
        self._heard, self._last = _Heard(now_s, stats), None
        if now_s - self._counted_s >= _COUNT_EVERY_S:
            self.count()

    def answered(self, idle: bool) -> None:
        """Renew the report as the engine has answered: its last statistics hold, or it is idle."""
        self.count()
        stats = None if idle or self._heard is None else self._heard.stats
        self._heard, self._last = _Heard(self._clock.now(), stats), None
        if idle:
            self._num_for_room.set(0)

    @property
    def last(self) -> InstanceReport | None:
        """The last report; None before the first."""
        if self._last is None and self._heard is not None:
            self._last = self._report(self._heard)
        return self._last

    @property
    def room_wait_s(self) -> float:
        """Seconds that the instance's prompts have waited for room in the store."""
        return self._room_wait_s + self._uncounted.get("room_wait_seconds", 0.0)

    def count(self) -> None:
        """Pass the counts since the last call, which may be empty, to the metrics and the meter."""
        counted, self._uncounted = self._uncounted, {}
        self._counted_s = self._clock.now()
        metrics.count_transfers(self._id, counted)
        self._room_wait_s += counted.get("room_wait_seconds", 0.0)
        for name in _ROOM:
            self._room[name] += counted.pop(name, 0.0)
        self._num_for_room.set(round(max(0.0, self._room["room_prompts"])))
        self.meter.record(counted, self._counted_s)
        self._step_error.set(self.meter.model.error_fraction)

    def _report(self, heard: _Heard) -> InstanceReport:
        meter, stats = self.meter, heard.stats
        usage = self._gpu.read() if self._gpu is not None else None
        return InstanceReport(
            stats.num_running_reqs if stats else 0,
            stats.num_waiting_reqs + stats.num_skipped_waiting_reqs if stats else 0,
            stats.kv_cache_usage if stats else 0.0,
            at_s=heard.at_s,
            back_pressure=self._pressure() if stats else None,
            busy_fraction=meter.busy_fraction,
            step_fill_fraction=meter.fill_fraction,
            step_s=meter.step_s,
            step_tokens=meter.step_tokens,
            gpu_busy_fraction=usage.busy_fraction if usage else None,
            gpu_memory_fraction=usage.memory_fraction if usage else None,
            step_coefficients=meter.coefficients,
            fetch_token_s=meter.fetch_block_s / self.block_tokens if self.block_tokens else 0.0,
        )

    def _pressure(self) -> BackPressure | None:
        """Return the back-pressure by the connector's gauges; None for none."""
        room, more = self._room, self._uncounted
        prompts, tokens, longest_s, *blocks = (room[name] + more.get(name, 0.0) for name in _ROOM)
        if prompts < 1:
            return None
        return BackPressure(round(prompts), round(tokens), longest_s, *map(round, blocks))
