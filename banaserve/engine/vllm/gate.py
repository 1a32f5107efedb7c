"""The cost gate of one engine: what its requests and steps mean as work, and what came of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from banaserve.engine.vllm.transfer_plan import Counters, StepDone
from banaserve.kvstore.cost_gate import CostGate, Verdict, Work

_KEPT_STEPS = 64
"""Steps that the worker has not answered yet; more are never under way."""


@dataclass(frozen=True, slots=True)
class _Planned:
    """A step that was planned.

    Attributes:
        work: What it computes.
        compute_s: The prediction for it, None where there was none.
        fetch_s: The prediction for its fetches, None where there was none.
    """

    work: Work
    compute_s: float | None
    fetch_s: float | None


class EngineGate:
    """Decides for requests, and learns from the steps that the worker has run.

    Args:
        gate: Where the predictors are.
        block_size: Tokens a block.
        stats: Counts decisions, predictions and outcomes.
    """

    def __init__(self, gate: CostGate, block_size: int, stats: Counters) -> None:
        self._gate = gate
        self._block_size = block_size
        self._stats = stats
        self._planned: dict[int, _Planned] = {}

    def block_budget_s(self, first_block: int, num_tokens: int) -> float:
        """What computing a block of the prompt takes, for the store's tiers; 0 if not known."""
        num_before = first_block * self._block_size
        num_blocks = -(-(num_tokens - num_before) // self._block_size)
        if num_blocks <= 0:
            return 0.0
        return self._gate.block_budget_s(num_blocks, Work.of(num_tokens - num_before, num_before))

    def decide(
        self, num_blocks: int, num_tokens: int, num_before: int, *, handed_over: bool = False
    ) -> Verdict:
        """Whether to fetch ``num_tokens`` tokens in ``num_blocks`` blocks that lie in the pool.

        Args:
            num_blocks: Blocks to copy.
            num_tokens: Tokens that would be computed otherwise.
            num_before: Tokens before them.
            handed_over: A prefill leg has computed them for this request.
        """
        work = Work.of(num_tokens, num_before)
        return self._gate.decide(num_blocks, work, handed_over=handed_over)

    def count(self, verdict: Verdict) -> None:
        """A request was scheduled by this verdict."""
        self._stats.add(**{f"decided_{verdict.decision.value}": 1})
        if verdict.decision.fetches and verdict.compute_s is not None:
            self._stats.add(avoided_compute_seconds=verdict.compute_s)

    def planned(self, step: int, computes: Iterable[tuple[int, int]], num_loads: int) -> None:
        """A step was planned.

        Args:
            step: Its number.
            computes: For each request the tokens computed before it and in it.
            num_loads: Blocks that it fetches.
        """
        work = Work()
        for num_before, num_tokens in computes:
            work += Work.of(num_tokens, num_before)
        if not work.tokens:
            return
        compute_s = self._gate.compute.predict_pass(work)
        fetch_s = self._gate.fetch.predict(num_loads) if num_loads else None
        self._planned[step] = _Planned(work, compute_s, fetch_s)
        while len(self._planned) > _KEPT_STEPS:
            del self._planned[next(iter(self._planned))]

    def done(self, done: StepDone) -> None:
        """A step has run: learn from it."""
        planned = self._planned.pop(done.step, None)
        if planned is None:
            return
        if done.compute_s is not None:
            taught = self._gate.compute.observe(planned.work, done.compute_s)
            if taught and planned.compute_s is not None:
                self._stats.add(
                    predicted_compute_seconds=planned.compute_s,
                    measured_compute_seconds=done.compute_s,
                )
        if done.fetched_blocks:
            self._gate.fetch.observe(done.fetched_blocks, done.fetch_s)
            if planned.fetch_s is not None:
                self._stats.add(
                    predicted_fetch_seconds=planned.fetch_s, measured_fetch_seconds=done.fetch_s
                )
