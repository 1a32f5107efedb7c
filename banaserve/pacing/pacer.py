"""Pacing: each step of an engine takes the time that it would take on the modelled device.

``DeviceClock`` is the timeline of the modelled device, ``GuestTimeReader`` reads the device time
that modules of other instances take, and ``in_parts`` computes the time of a step whose host and
guests compute at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from banaserve.orchestrator.control.costs.profile import Profile
from banaserve.orchestrator.control.costs.steps import StepCosts
from banaserve.orchestrator.control.costs.transfers import Copied, StepTimes, step_times
from banaserve.orchestrator.control.model.learnt_time import StepWork
from banaserve.orchestrator.control.model.overlapping import LEAST_PART_TOKENS, WORTH, makespan_s
from banaserve.pacing.placement_cost import RemoteShare
from banaserve.pacing.step_log import SUFFIX, PacedStep, StepLog, StepReader, readers


class DeviceClock:
    """Timeline of a modelled device. All times are seconds of one monotonic clock.

    A step begins when the previous one has ended or when the engine got work, whichever is later:
    the time of the engine's own code in between is part of the step, as it is in step times that
    were measured from outside.

    Attributes:
        free_s: Begin of the step under way, or the earliest begin of the next one.
    """

    def __init__(self, now_s: float) -> None:
        self.free_s = now_s
        self._step_s = 0.0

    def woke(self, now_s: float) -> None:
        """Note that there was nothing to compute until now."""
        self.free_s = max(self.free_s, now_s)

    def begin(self, step_s: float) -> None:
        """Begin a step of ``step_s`` seconds."""
        self._step_s = step_s

    @property
    def deadline_s(self) -> float:
        """Time at which the step under way should end."""
        return self.free_s + self._step_s

    def end(self, worked_s: float) -> bool:
        """End the step under way; return whether it overran.

        A step that overran delays the following ones. A step whose output was only released late,
        since the process woke late, does not.

        Args:
            worked_s: Time at which the step's real work was done.
        """
        overran = worked_s > self.deadline_s
        self.free_s = max(worked_s, self.deadline_s)
        self._step_s = 0.0
        return overran


_LOOK_S = 1.0
"""Interval at which to look for newly started instances, in seconds."""


class GuestTimeReader:
    """Reader of the device time that guests take, which their hosts record.

    Args:
        folder: Folder in which all instances record their steps.
        instance_id: Instance whose device the guests use.
    """

    def __init__(self, folder: Path, instance_id: str) -> None:
        self._folder = folder
        self._id = instance_id
        self._logs: list[StepReader] = []
        self._seen_s: dict[str, float] = {}
        self._looked_s = float("-inf")

    def taken(self, now_s: float) -> float:
        """Return the seconds of the device that guests have taken since the last call."""
        if now_s - self._looked_s >= _LOOK_S:
            self._looked_s = now_s
            self._logs = [log for log in readers(self._folder) if log.instance_id != self._id]
        taken_s = 0.0
        for log in self._logs:
            total_s = log.taken(self._id)
            taken_s += total_s - self._seen_s.get(log.instance_id, total_s)
            self._seen_s[log.instance_id] = total_s
        return max(0.0, taken_s)


class InParts(NamedTuple):
    """Times of a step that is cut into the best number of parts.

    Attributes:
        relief: Share of the step's own time, without messages, that is saved.
        busy_s: Seconds that all parts take on all devices together, without messages.
    """

    relief: float
    busy_s: float


def in_parts(
    costs: StepCosts, work: StepWork, elsewhere: Sequence[float], max_microbatches: int
) -> InParts:
    """Choose the best number of parts of a step; each part costs a step's fixed part again.

    Messages are assumed not to overlap with computing.

    Args:
        costs: Step costs of the host without any relief.
        elsewhere: Shares of the host's time on the device of each guest that may compute
            concurrently.
        max_microbatches: Maximum number of parts; 1: the host waits for its guests.
    """
    tokens = int(work.prefill_tokens + work.decode_requests)
    at_most = max(1, min(max_microbatches, tokens // LEAST_PART_TOKENS)) if elsewhere else 1
    here = 1.0 - sum(elsewhere)
    whole_s = best_s = busy_s = _part_s(costs, work, 1)
    for num_parts in range(2, at_most + 1):
        part_s = _part_s(costs, work, num_parts)
        took_s = makespan_s([share * part_s for share in (here, *elsewhere)], num_parts)
        if took_s < min(best_s, WORTH * whole_s):
            best_s, busy_s = took_s, num_parts * part_s
    return InParts(1.0 - best_s / whole_s if whole_s > 0 else 0.0, busy_s)


def _part_s(costs: StepCosts, work: StepWork, num_parts: int) -> float:
    step_s, _ = costs.mixed_s(
        -(-int(work.prefill_tokens) // num_parts),
        -(-int(work.prefill_pairs) // num_parts),
        -(-int(work.decode_requests) // num_parts),
        -(-int(work.context_tokens) // num_parts),
    )
    return step_s - costs.hop_s


class Pacer:
    """Pacer of one worker, in the model runner's thread, which sleeps until a step may end.

    Args:
        folder: Folder in which instances record their steps.
        dilation: Wall seconds of one modelled second.
        now_s: Function that returns the time of a monotonic clock that all instances share.
        sleep: Function that blocks for a number of seconds of that clock.

    Attributes:
        now_s: Function that returns the time of the clock.
        away: Cost of the modules that run elsewhere; changed between two steps.
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
        self.away = RemoteShare()
        self.now_s = now_s
        self._sleep = sleep
        self._costs = StepCosts(profile)
        self._log = StepLog(folder / f"{instance_id}{SUFFIX}", dilation)
        self._device = DeviceClock(now_s())
        self._step: tuple[StepWork, float, float] | None = None
        self._lodgers = GuestTimeReader(folder, instance_id)

    def woke(self) -> None:
        """Note that the engine had nothing to compute until now."""
        now_s = self.now_s()
        self._device.woke(now_s)
        self._lodgers.taken(now_s)

    def begin(self, work: StepWork, copied: Copied) -> StepTimes:
        """Begin a step of ``work``; return its modelled times, in wall seconds."""
        tokens = work.prefill_tokens + work.decode_requests
        self._costs.hop_s = self.away.hop_s + self.away.hop_token_s * tokens
        self._costs.relief = 0.0
        parts = in_parts(self._costs, work, self.away.elsewhere, self.away.max_microbatches)
        self._costs.relief = parts.relief
        found = step_times(self._costs, work, copied)
        times = StepTimes(
            found.step_s * self.dilation,
            found.compute_s * self.dilation,
            found.fetch_s * self.dilation,
        )
        # The time that guests took of this device during the last step is added to this one.
        step_s = times.step_s + self._lodgers.taken(self.now_s())
        self._device.begin(step_s)
        self._step = work, parts.busy_s * self.dilation, step_s
        return times

    def end(self) -> None:
        """End the step whose work is done: return when its modelled time has passed."""
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
        """Return when ``modelled_s`` modelled seconds have passed since ``began_s``."""
        left_s = began_s + modelled_s * self.dilation - self.now_s()
        if left_s > 0:
            self._sleep(left_s)
