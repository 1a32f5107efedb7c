"""Classical cases of the advice, on step times of measured operators.

All are of Llama-3.1-70B in fp8 on H200, each instance on two GPUs. Constants and errors are those
of its runs in ``benchmarks/results/silicon-runs.json``, memory is the package's estimate, and the
link is the profile's.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from banaserve.orchestrator.control.costs.profile import load
from banaserve.sim.instances.prefix_cache import HASH_BLOCK_TOKENS
from banaserve.sim.result import LatencyLimits
from banaserve.sim.trace import Arrival
from banaserve_bench.plan.search.advisor import Advice, PlanQuestion, advise, screen
from banaserve_bench.plan.search.gain import Answer
from banaserve_bench.plan.search.loads import PlanLoads
from banaserve_bench.plan.search.trial import Device, StepError
from banaserve_bench.silicon.aiconfigurator import AiconfiguratorTimes
from banaserve_bench.silicon.costs import EngineConstants
from banaserve_bench.silicon.description import ErrorSection, StepTimesDescription
from banaserve_bench.simulation.lengths import draw_measured
from benchmarks.plan.loads import Draw, even_lengths, poisson_rows

_MODEL, _GPU, _GPUS = "nvidia/Llama-3.1-70B-Instruct-FP8", "h200_sxm", 2
_CONSTANTS = EngineConstants(6.0e-4, 2.6e-5, 0.98, 1.19)
_ERROR = ErrorSection(ttft=0.056, tpot=0.037, latency=0.037)
_KV_TOKENS = 1_166_945
_FEW_TOKENS = 120_000
"""KV cache beside which memory holds hardly more than weights."""
_NUM_LOADS = 5
_DURATION_S = 30.0
_arrivals = partial(poisson_rows, duration_s=_DURATION_S)
_TURNS = 6
_TURN_BLOCKS = 4
_BLOCK_TOKENS = 512
"""Tokens of a block whose hash a trace has."""


class ClassicalCase(NamedTuple):
    """Load and limits, and the answers that are right.

    Attributes:
        right: Answers that are right.
        reason: Counter-offer that the advice has to make; None for none.
        kv_tokens: Tokens that fit into the KV cache of an instance.
    """

    name: str
    rows: Callable[[random.Random], Iterator[Arrival]]
    limits: LatencyLimits
    right: Sequence[Answer]
    instances: int = 4
    reason: str | None = None
    kv_tokens: int = _KV_TOKENS


def _like(name: str) -> Draw:
    def lengths(draws: random.Random) -> tuple[int, int]:
        prompt, output = (
            draw_measured(f"{name}_prompt", draws),
            draw_measured(f"{name}_output", draws),
        )
        return round(prompt), max(2, round(output))

    return lengths


def _chats(draws: random.Random, rate_per_s: float) -> Iterator[Arrival]:
    """Yield turns of chats, each with the whole chat before it as its prefix."""
    turns = []
    starts = _arrivals(draws, rate_per_s=rate_per_s / _TURNS, lengths=even_lengths(1, 1))
    for chat, start in enumerate(starts):
        at_s = start.at_s
        for turn in range(1, _TURNS + 1):
            ids = tuple(chat * _TURNS * _TURN_BLOCKS + n for n in range(turn * _TURN_BLOCKS))
            turns.append(Arrival(at_s, turn * _TURN_BLOCKS * HASH_BLOCK_TOKENS, 150, ids))
            at_s += draws.uniform(2.0, 8.0)
    yield from sorted(turns)


def cases() -> Iterator[ClassicalCase]:
    not_yes = (Answer.NO, Answer.CANNOT_TELL)
    for name, rates, limits in (
        ("alpaca", (10, 40), LatencyLimits(0.5, 0.05)),
        ("longbench", (2, 4), LatencyLimits(5.0, 0.1)),
    ):
        for rate in rates:
            rows = partial(_arrivals, rate_per_s=rate, lengths=_like(name))
            yield ClassicalCase(f"the paper's {name}, {rate:g}/s", rows, limits, not_yes)
    rows = partial(_arrivals, rate_per_s=2, lengths=even_lengths(8000, 200))
    tight = LatencyLimits(3.0, 0.02)
    yield ClassicalCase("long prompts, tight TPOT", rows, tight, (Answer.YES,))
    rows = partial(_chats, rate_per_s=11)
    limits = LatencyLimits(1.0, 0.05)
    yield ClassicalCase("chats with shared prefixes", rows, limits, not_yes, reason="store")
    rows = partial(_arrivals, rate_per_s=5, lengths=even_lengths(200, 50))
    yield ClassicalCase("one device", rows, limits, (Answer.NO,), instances=1)
    rows = partial(_arrivals, rate_per_s=20, lengths=even_lengths(1000, 1000))
    limits = LatencyLimits(3.0, 0.05)
    yield ClassicalCase(
        "decode bound by memory", rows, limits, not_yes, reason="instances", kv_tokens=_FEW_TOKENS
    )


def advised(case: ClassicalCase) -> Advice:
    loads = [list(case.rows(random.Random(seed))) for seed in range(_NUM_LOADS + 1)]
    profile = load("llama-3.1-70b-h100-tp4")
    memory = replace(profile.memory, kv_tokens=case.kv_tokens)
    times = AiconfiguratorTimes(_MODEL, _GPU, _GPUS)
    measured = StepTimesDescription("", "", "", "", _ERROR, _CONSTANTS, times)
    asked = PlanQuestion(
        device=Device(replace(profile, memory=memory), measured),
        profile_name=profile.name,
        error=StepError.of(_ERROR),
        limits=case.limits,
        loads=PlanLoads(loads[0], loads[1:], are_windows=False),
        instances=case.instances,
    )
    return advise(asked, screen(asked, _untold), _untold)


def _untold(words: str) -> None:
    """Ignore the progress."""


def is_right(case: ClassicalCase, advice: Advice) -> bool:
    """Return whether the answer is one of the right ones, and the reason is among the offers."""
    offers = {one.kind for one in advice.offers}
    return advice.answer in case.right and (case.reason is None or case.reason in offers)
