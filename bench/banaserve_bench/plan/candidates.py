"""Candidates: systems of equally many instances that a load may be served with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from banaserve.sim.result import LatencyLimits
from banaserve.sim.system import System, following, preset

USUAL_STEP_TOKENS = 2048
"""Step size of a candidate that does not vary it."""
MOST_STEP_TOKENS = 8192
_COLOCATED_STEPS = (USUAL_STEP_TOKENS, 512, MOST_STEP_TOKENS)
_SPLIT_STEPS = (USUAL_STEP_TOKENS, MOST_STEP_TOKENS)
_MOST_SPLITS = 7


@dataclass(frozen=True, slots=True)
class Candidate:
    """System that a load may be served with.

    Attributes:
        words: Words after ``banaserve serve MODEL`` that start the system.
    """

    name: str
    system: System
    words: Sequence[str]

    @property
    def is_colocated(self) -> bool:
        """True if each instance always does both, prefill and decode."""
        return self.system.kind == "colocated"

    @property
    def step_tokens(self) -> int:
        """Maximum number of tokens of a step."""
        return self.system.limits.step_tokens

    @property
    def has_store(self) -> bool:
        """True if all instances share the store."""
        return self.system.cache == "global"


def colocated(instances: int, step_tokens: int = USUAL_STEP_TOKENS, *, store: bool) -> Candidate:
    """Return instances that do both, with their own prefix caches or with one store for all."""
    system = preset(
        "colocated",
        colocated=instances,
        cache="global" if store else "local",
        limits={"step_tokens": step_tokens},
    )
    words = ("--colocated", str(instances), *(() if store else ("--no-kv-store",)))
    name = f"{instances} colocated{' with the store' if store else ''}"
    return Candidate(_named(name, step_tokens), system, (*words, *_step_words(step_tokens)))


def split(prefill: int, decode: int, step_tokens: int) -> Candidate:
    """Return instances with fixed roles that hand KV over through the store."""
    system = preset(
        "static",
        prefill=prefill,
        decode=decode,
        handover="store",
        cache="global",
        limits={"step_tokens": step_tokens},
    )
    words = ("--pd", f"{prefill}:{decode}", *_step_words(step_tokens))
    return Candidate(_named(f"split {prefill}:{decode}", step_tokens), system, words)


def elastic(instances: int, profile_name: str, limits: LatencyLimits) -> Candidate:
    """Return instances whose roles and step sizes follow the load."""
    system = following(
        preset("elastic", colocated=instances), profile_name, limits.ttft_s, limits.tpot_s
    )
    of_limits = ("--slo-ttft", f"{limits.ttft_s:g}", "--slo-tpot", f"{limits.tpot_s:g}")
    return Candidate(f"{instances} elastic", system, ("--instances", str(instances), *of_limits))


def fixed_candidates(instances: int, has_prefixes: bool, max_step_tokens: int) -> list[Candidate]:
    """Return the candidates whose roles stay as they are: colocated ones, then splits.

    Args:
        has_prefixes: True if requests share known prefixes, so that a store can make a difference.
    """
    stores = (False, True) if has_prefixes else (False,)
    found = [
        colocated(instances, tokens, store=store) for store in stores for tokens in _COLOCATED_STEPS
    ]
    for prefill in _prefills(instances):
        found += [split(prefill, instances - prefill, tokens) for tokens in _SPLIT_STEPS]
    return [one for one in found if one.step_tokens <= max_step_tokens]


def _prefills(instances: int) -> list[int]:
    """Return numbers of prefill instances, evenly distributed where all would be too many."""
    most = instances - 1
    places = min(most, _MOST_SPLITS)
    return sorted({1 + round(place * (most - 1) / max(1, places - 1)) for place in range(places)})


def _named(name: str, step_tokens: int) -> str:
    return f"{name} (steps of {step_tokens} tokens)"


def _step_words(step_tokens: int) -> tuple[str, ...]:
    return ("--", "--max-num-batched-tokens", str(step_tokens))
