"""Gives each step of one engine the time that it would take on the modelled device."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from banaserve.costs.profile import Profile
from banaserve.costs.steps import StepCosts
from banaserve.costs.transfers import Copied, StepTimes, step_times
from banaserve.engine.vllm.pacing.away import Away
from banaserve.engine.vllm.pacing.device import Device
from banaserve.engine.vllm.pacing.lodgers import Lodgers
from banaserve.engine.vllm.pacing.parts import in_parts
from banaserve.engine.vllm.pacing.step_log import SUFFIX, PacedStep, StepLog
from banaserve.orchestrator.model.calibration import StepWork


class Pacer:
    """One per worker. Works in the model runner's thread, which sleeps until a step may end.

    Args:
        folder: Where instances record their steps.
        dilation: Wall seconds of one modelled second.
        now_s: A monotonic clock that all instances share.
        sleep: Blocks for so many seconds of it.

    Attributes:
        now_s: Its clock.
        away: What runs elsewhere; changed between two steps.
    """

    def __init__(
        self,
        profile: Profile,
        instance_id: str,
        folder: Path,
        dilation: float,
        now_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.profile = profile
        self.dilation = dilation
        self.away = Away()
        self._id = instance_id
        self._folder = folder
        self.now_s = now_s
        self._sleep = sleep
        self._costs = StepCosts(profile)
        self._log = StepLog(folder / f"{instance_id}{SUFFIX}", dilation)
        self._device = Device(now_s())
        self._step: tuple[StepWork, float, float] | None = None
        self._lodgers = Lodgers(folder, instance_id)

    def woke(self) -> None:
        """The engine had nothing to compute until now."""
        now_s = self.now_s()
        self._device.woke(now_s)
        self._lodgers.taken(now_s)

    def begin(self, work: StepWork, copied: Copied) -> StepTimes:
        """A step of ``work`` begins; returns its times, in wall seconds."""
        tokens = work.prefill_tokens + work.decode_requests
        self._costs.hop_s = self.away.hop_s + self.away.hop_token_s * tokens
        self._costs.relief = 0.0
        parts = in_parts(self._costs, work, self.away.elsewhere, self.away.most_parts)
        self._costs.relief = parts.relief
        found = step_times(self._costs, work, copied)
        times = StepTimes(
            found.step_s * self.dilation,
            found.compute_s * self.dilation,
            found.fetch_s * self.dilation,
        )
        # What guests took of this device while the last step ran, this one pays.
        step_s = times.step_s + self._lodgers.taken(self.now_s())
        self._device.begin(step_s)
        self._step = work, parts.busy_s * self.dilation, step_s
        return times

    def end(self) -> None:
        """The step's work is done: return when its time is up."""
        if self._step is None:
            return
        (work, busy_s, step_s), self._step = self._step, None
        began_s, deadline_s, worked_s = self._device.free_s, self._device.deadline_s, self.now_s()
        if worked_s < deadline_s:
            self._sleep(deadline_s - worked_s)
        took_s = self.now_s() - began_s
        overran = self._device.end(worked_s)
        tokens, requests = work.prefill_tokens, work.decode_requests
        step = PacedStep(began_s, step_s, worked_s - began_s, took_s, tokens, requests)
        self._log.add(step, overran)
        for target, share in self.away.shares:
            self._log.take(target, share * busy_s)

    def hold(self, began_s: float, modelled_s: float) -> None:
        """Return when ``modelled_s`` seconds of the model have passed since ``began_s``."""
        left_s = began_s + modelled_s * self.dilation - self.now_s()
        if left_s > 0:
            self._sleep(left_s)
