"""Records of the blind comparison: what was told of a cell, and which system was better. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import msgspec

from banaserve.sim.result import LatencyLimits
from banaserve_bench.plan.search.gain import MOST_RATIO, Answer
from banaserve_bench.results.statistics import Interval
from benchmarks.measurement import Samples
from benchmarks.plan.foreseen import GOODPUT, TPOT, TTFT, ForeseenSystem
from benchmarks.plan.verdicts import right_answer

_SYSTEMS = ("colocated", "split")


class BlindRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Advice on a cell, written before its engines run, and their outcomes.

    Attributes:
        rate_per_s: Mean rate of the requests that engines get, in modelled time.
        duration_s: Time in which they arrive, in modelled seconds.
        told: Answer of the advisor.
        gain: Gain that it expects, with its interval.
        colocated: Best colocated system by the advice.
        split: Best split by the advice.
    """

    num_requests: int
    rate_per_s: float
    duration_s: float
    limits: LatencyLimits
    dilation: float
    told: Answer
    gain: Interval
    colocated: ForeseenSystem
    split: ForeseenSystem

    @property
    def systems(self) -> dict[str, ForeseenSystem]:
        """Both systems, by the attribute's name."""
        return {name: getattr(self, name) for name in _SYSTEMS}

    @property
    def is_run(self) -> bool:
        """True if both systems have run, be it in time or not."""
        return all(one.outcome is not None for one in self.systems.values())

    @property
    def is_void(self) -> bool:
        """True if a system's times mean nothing."""
        return any(one.is_void for one in self.systems.values())

    @property
    def measured(self) -> float:
        """Ratio of the goodput of the split to that of the colocated system, on engines."""
        split, colocated = (
            round((one.outcome or {})[GOODPUT] * self.num_requests)
            for one in (self.split, self.colocated)
        )
        # Half a request stands for none.
        return min(MOST_RATIO, split / max(colocated, 0.5))

    @property
    def pays(self) -> Answer:
        return right_answer(self.measured)

    @property
    def words(self) -> str:
        """Verdict on the advice."""
        if not self.is_run:
            return "not run"
        if self.is_void:
            return "void"
        if self.told is Answer.CANNOT_TELL:
            return self.told
        return "right" if self.told is self.pays else "wrong"


def samples_of(records: Iterable[BlindRecord]) -> Samples:
    """Return samples and their unit by figure, of the cells that have run."""
    ran = [one for one in records if one.is_run]
    judged = [one for one in ran if not one.is_void]
    counts: dict[str, Sequence[bool]] = {
        "cells": [True for _ in ran],
        "void": [one.is_void for one in ran],
        "pays": [one.pays is Answer.YES for one in judged],
        "right": [one.words == "right" for one in judged],
        "can't tell": [one.told is Answer.CANNOT_TELL for one in judged],
        "wrong yes": [one.words == "wrong" and one.told is Answer.YES for one in judged],
        "wrong no": [one.words == "wrong" and one.told is Answer.NO for one in judged],
        "estimate right": [right_answer(one.gain.estimate) is one.pays for one in judged],
    }
    found: Samples = {name: ([float(sum(of))], "cells") for name, of in counts.items()}
    systems = list(chain.from_iterable(one.systems.values() for one in judged))
    if systems:
        for name, figure in (("TTFT", TTFT), ("TPOT", TPOT)):
            errors = [abs(one.error(figure)) for one in systems]
            found[f"{name} error"] = (errors, "relative error without sign")
        points = [
            100 * abs(one.predicted[GOODPUT] - (one.outcome or {})[GOODPUT]) for one in systems
        ]
        found["goodput error"] = (points, "percentage points without sign")
    return found
