"""Simulated instance: an engine with its role, its reports and the modules it runs for others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from banaserve.base.types import (
    Distance,
    InstanceFacts,
    InstanceId,
    InstanceReport,
    InstanceView,
    ModulePlacement,
    Role,
)
from banaserve.orchestrator.control.projection import slabs
from banaserve.sim.instances.engine import SimEngine
from banaserve.sim.request import SimRequest

REPORT_S = 0.5
"""Period of the reports of an instance without events, in seconds."""

_FRESH_S = 0.1
"""Period of the reports of an instance that serves, in seconds; the router's counts are live."""

_SMOOTHING_S = 2.0


class SimInstance:
    """Engine as the router and the migration policy know it.

    Attributes:
        inflight: Number of requests that the router has sent there and that have not ended.
        inflight_tokens: Number of tokens that those requests had when they arrived.
        inflight_prefill_tokens: Number of these tokens that are still to be computed.
        fetch_token_s: Time to fetch the KV of one token, in seconds.
        link_free_s: Time at which the last transfer in the link's queue will be done, in seconds.
        far: Network paths to instances on other machines, as in the instance's view.
        is_ready: True if the instance serves, as far as the router knows.
        is_dirty: True if the view is out of date because something has changed.
        view_old_s: Time at which the view becomes out of date by its age, in seconds.
    """

    def __init__(
        self,
        engine: SimEngine,
        role: Role,
        facts: InstanceFacts,
        tokens_per_s: float,
        fetch_token_s: float = 0.0,
    ) -> None:
        self.id = engine.name
        self.engine = engine
        self.role = role
        self.facts = facts
        self.placements: tuple[ModulePlacement, ...] = ()
        self.guest_bytes = 0
        self.epoch = 0
        self.changed_s: float | None = None
        self.inflight = 0
        self.inflight_tokens = 0
        self.coming = 0
        self.fetch_token_s = fetch_token_s
        self.forget_prompts()
        self.link_free_s = 0.0
        self.far: Mapping[InstanceId, Distance | None] = {}
        self.is_ready = True
        self.is_dirty = True
        self.view_old_s = 0.0
        self.busy_fraction = 0.0
        self._fill = 1.0
        self._own_step_tokens = engine.limits.step_tokens
        self._fill_of_full_step()
        self._tokens_per_s = tokens_per_s
        self._kv_token_bytes = facts.num_layers * facts.layer_token_bytes
        self._last = (0.0, 0.0, 0.0)
        self._report: InstanceReport | None = None
        self._view: InstanceView | None = None

    def set_step_tokens(self, tokens: int) -> None:
        """Limit the next steps to ``tokens``; 0 restores the limit of the start."""
        tokens = tokens or self._own_step_tokens
        if tokens != self.engine.limits.step_tokens:
            self.engine.limits = replace(self.engine.limits, step_tokens=tokens)
            self._fill_of_full_step()
            self.is_dirty = True

    def _fill_of_full_step(self) -> None:
        step_s, work_s = self.engine.costs.mixed_s(self.engine.limits.step_tokens, 0, 0, 0)
        self._full = work_s / step_s

    # ---- what the router counts

    def take(self, request: SimRequest, tokens: int, to_compute: int = 0) -> None:
        """Count ``request``, which arrives with ``tokens``; ``to_compute`` of them need prefill."""
        self.inflight += 1
        self.inflight_tokens += tokens
        request.counted_tokens = tokens
        self.is_dirty = True
        if to_compute:
            request.uncounted_tokens = to_compute
            self._count_prompt(request, 1)

    def prefilled(self, request: SimRequest) -> None:
        """Record that the prompt of ``request`` is computed."""
        if request.uncounted_tokens:
            self._count_prompt(request, -1)
            request.uncounted_tokens = 0
        self.is_dirty = True

    def expect(self, request: SimRequest) -> None:
        """Count ``request`` as one that will decode here once its prompt is computed elsewhere."""
        request.expected_by = self
        self.coming += 1
        self.is_dirty = True

    def leave(self, request: SimRequest) -> None:
        """Uncount ``request``, which continues elsewhere or has ended."""
        self.inflight -= 1
        self.inflight_tokens -= request.counted_tokens
        self.is_dirty = True

    def forget_prompts(self) -> None:
        """Reset the counts of prompts that are still to be computed here."""
        self.inflight_prefill_tokens = self.inflight_prefill_requests = 0
        self.inflight_prefill_pairs = 0

    def _count_prompt(self, request: SimRequest, sign: int) -> None:
        tokens = request.uncounted_tokens
        self.inflight_prefill_tokens += sign * tokens
        self.inflight_prefill_requests += sign
        self.inflight_prefill_pairs += sign * tokens * (2 * request.counted_tokens - tokens)

    @property
    def kv_blocks(self) -> int:
        """Return the number of KV blocks that fit beside guests, with modules away."""
        away = [placement.module for placement in self.placements]
        return slabs.blocks(self.facts, away, self.guest_bytes)

    def fit(self) -> None:
        """Let the engine have the KV blocks that fit."""
        self.engine.resize(self.kv_blocks * self.facts.block_tokens)
        self.is_dirty = True

    def view(self, now_s: float) -> InstanceView:
        """Return the view, rebuilt only if something has changed or the report is old."""
        report = self._report
        age_s = float("inf") if report is None else now_s - report.at_s
        if self._view is not None and not self.is_dirty and age_s <= REPORT_S:
            return self._view
        if report is None or age_s >= _FRESH_S:
            report = self._report = self._make_report(now_s)
        self.is_dirty = False
        self.view_old_s = report.at_s + REPORT_S
        self._view = InstanceView(
            self.id,
            self.role,
            self.is_ready,
            report,
            self.inflight,
            max(0, self.inflight_prefill_tokens),
            self._tokens_per_s,
            self.facts,
            self.placements,
            self.epoch,
            self.changed_s,
            self.engine.limits.step_tokens,
            self.inflight_tokens,
            self.inflight_prefill_requests,
            self.inflight_prefill_pairs,
            self.engine.kv_tokens,
            self.far,
            self._kv_token_bytes,
            self.coming,
        )
        return self._view

    def _make_report(self, now_s: float) -> InstanceReport:
        self._smooth(now_s)
        engine = self.engine
        blocks = engine.kv_tokens // self.facts.block_tokens
        used = engine.used_tokens / engine.kv_tokens if engine.kv_tokens > 0 else 1.0
        return InstanceReport(
            num_running=engine.num_running,
            num_waiting=len(engine.waiting),
            kv_used_fraction=used if used < 1.0 else 1.0,
            busy_fraction=self.busy_fraction,
            at_s=now_s,
            step_fill_fraction=self._fill,
            step_s=engine.step_s,
            num_kv_blocks=blocks,
            guest_bytes=self.guest_bytes,
            step_coefficients=engine.costs.coefficients(engine.num_running),
            fetch_token_s=self.fetch_token_s,
        )

    def _smooth(self, now_s: float) -> None:
        """Smooth busy and fill fractions over the last seconds, as the real worker's reports do."""
        busy_s, work_s = self.engine.busy()
        last_s, last_busy_s, last_work_s = self._last
        elapsed_s = now_s - last_s
        if elapsed_s <= 0:
            return
        weight = min(1.0, elapsed_s / _SMOOTHING_S)
        sample = min(1.0, max(0.0, busy_s - last_busy_s) / elapsed_s)
        self.busy_fraction += weight * (sample - self.busy_fraction)
        if busy_s > last_busy_s:
            fill = max(0.0, (work_s - last_work_s) / (busy_s - last_busy_s))
            self._fill += weight * (min(1.0, fill / self._full) - self._fill)
        prefilled, prefill_s = self.engine.prefilled_tokens, self.engine.prefill_busy_s
        if prefill_s > 1.0:
            self._tokens_per_s = prefilled / prefill_s
        self._last = (now_s, busy_s, work_s)
