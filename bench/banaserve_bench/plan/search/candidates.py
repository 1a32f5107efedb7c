"""Candidates: systems of equally many instances that a load may be served with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from banaserve.sim.result import LatencyLimits
from banaserve.sim.system import System, following, preset

USUAL_STEP_TOKENS = 2048
"""Step size of a candidate that does not vary it."""
MOST_STEP_TOKENS = 8192
USUAL_STORE_GIB = 64
"""Memory of the store of a candidate that does not vary it."""
_COLOCATED_STEPS = (USUAL_STEP_TOKENS, 512, MOST_STEP_TOKENS)
_SPLIT_STEPS = (USUAL_STEP_TOKENS, MOST_STEP_TOKENS)
_OTHER_STORES_GIB = (16, 256)
_MOST_SPLITS = 7


@dataclass(frozen=True, slots=True)
class Candidate:
    """System that a load may be served with.

    Attributes:
        arrangement: Name without sizes of steps and store, and without the store of colocated ones.
        words: Words after ``banaserve serve MODEL`` that start the system.
        gpus: Number of GPUs of each instance.
        store_gib: Memory of the store; 0 without one.
    """

    name: str
    system: System
    words: Sequence[str]
    arrangement: str
    gpus: int = 1
    store_gib: int = 0

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

    @property
    def is_usual(self) -> bool:
        """True if its steps and its store have the usual sizes."""
        return self.step_tokens == USUAL_STEP_TOKENS and self.store_gib in (0, USUAL_STORE_GIB)

    @property
    def num_instances(self) -> int:
        return len(self.system.roles())


@dataclass(frozen=True, slots=True)
class InstanceShape:
    """What candidates of one kind of instance have in common.

    Attributes:
        token_bytes: Size of the KV of a token, of the whole instance.
        is_one_of_several: True if instances of other numbers of GPUs are candidates, too.
        has_whole_context: True if an instance has room for a request of the model's whole context:
            else vLLM refuses to start unless it may choose a shorter one.
    """

    gpus: int = 1
    token_bytes: int = 131_072
    is_one_of_several: bool = False
    has_whole_context: bool = True

    @property
    def suffix(self) -> str:
        """Words that tell instances of this shape from others, after their number."""
        return f" of {self.gpus} GPU{'s' * (self.gpus > 1)}" if self.is_one_of_several else ""

    @property
    def engine_words(self) -> tuple[str, ...]:
        of_context = () if self.has_whole_context else ("--max-model-len", "auto")
        of_gpus = ("--tensor-parallel-size", str(self.gpus)) if self.gpus > 1 else ()
        return (*of_context, *of_gpus)

    def store_tokens(self, gib: int) -> int:
        """Return the capacity of a store, in tokens."""
        return gib * 2**30 // self.token_bytes


_ONE_GPU = InstanceShape()


def colocated(
    instances: int,
    step_tokens: int = USUAL_STEP_TOKENS,
    *,
    store: bool,
    shape: InstanceShape = _ONE_GPU,
    store_gib: int = USUAL_STORE_GIB,
) -> Candidate:
    """Return instances that do both, with their own prefix caches or with one store for all."""
    gib = store_gib if store else 0
    system = preset(
        "colocated",
        colocated=instances,
        cache="global" if store else "local",
        limits={"step_tokens": step_tokens},
        store_tokens=shape.store_tokens(gib),
    )
    arrangement = f"{instances} colocated{shape.suffix}"
    words = ("--colocated", str(instances), *(_store_words(gib) if store else ("--no-kv-store",)))
    return _candidate(arrangement, system, words, shape, gib)


def split(
    prefill: int,
    decode: int,
    step_tokens: int,
    shape: InstanceShape = _ONE_GPU,
    store_gib: int = USUAL_STORE_GIB,
) -> Candidate:
    """Return instances with fixed roles that hand KV over through the store."""
    system = preset(
        "static",
        prefill=prefill,
        decode=decode,
        handover="store",
        cache="global",
        limits={"step_tokens": step_tokens},
        store_tokens=shape.store_tokens(store_gib),
    )
    words = ("--pd", f"{prefill}:{decode}", *_store_words(store_gib))
    return _candidate(f"split {prefill}:{decode}{shape.suffix}", system, words, shape, store_gib)


def elastic(
    instances: int, profile_name: str, limits: LatencyLimits, shape: InstanceShape = _ONE_GPU
) -> Candidate:
    """Return instances whose roles and step sizes follow the load, with the store.

    Args:
        profile_name: Name or file of the profile that the policy forecasts with; empty for the step
            times that instances learn.
    """
    system = following(
        preset("elastic", colocated=instances, store_tokens=shape.store_tokens(USUAL_STORE_GIB)),
        profile_name,
        limits.ttft_s,
        limits.tpot_s,
    )
    of_limits = ("--slo-ttft", f"{limits.ttft_s:g}", "--slo-tpot", f"{limits.tpot_s:g}")
    words = ("--instances", str(instances), *of_limits, *_store_words(USUAL_STORE_GIB))
    if shape.engine_words:
        words += ("--", *shape.engine_words)
    name = f"{instances} elastic{shape.suffix}"
    return Candidate(name, system, words, name, shape.gpus, USUAL_STORE_GIB)


def fixed_candidates(
    instances: int, has_prefixes: bool, max_step_tokens: int, shape: InstanceShape = _ONE_GPU
) -> list[Candidate]:
    """Return the candidates whose roles stay as they are: colocated ones, then splits.

    Args:
        has_prefixes: True if requests share known prefixes, so that a store can make a difference.
    """
    stores = (False, True) if has_prefixes else (False,)
    others = _OTHER_STORES_GIB if has_prefixes else ()
    found = [
        colocated(instances, tokens, store=store, shape=shape)
        for store in stores
        for tokens in _COLOCATED_STEPS
    ]
    found += [colocated(instances, store=True, shape=shape, store_gib=gib) for gib in others]
    for prefill in _prefills(instances):
        decode = instances - prefill
        found += [split(prefill, decode, tokens, shape) for tokens in _SPLIT_STEPS]
        found += [split(prefill, decode, USUAL_STEP_TOKENS, shape, gib) for gib in others]
    return [one for one in found if one.step_tokens <= max_step_tokens]


def _prefills(instances: int) -> list[int]:
    """Return numbers of prefill instances, evenly distributed where all would be too many."""
    most = instances - 1
    places = min(most, _MOST_SPLITS)
    return sorted({1 + round(place * (most - 1) / max(1, places - 1)) for place in range(places)})


def _candidate(
    arrangement: str, system: System, words: Sequence[str], shape: InstanceShape, store_gib: int
) -> Candidate:
    steps = system.limits.step_tokens
    of_store = ""
    if store_gib and system.kind == "colocated":
        of_store = " with the store"
    if store_gib not in (0, USUAL_STORE_GIB):
        of_store = f"{of_store or ' with the store'} of {store_gib} GiB"
    return Candidate(
        f"{arrangement}{of_store} (steps of {steps} tokens)",
        system,
        (*words, "--", "--max-num-batched-tokens", str(steps), *shape.engine_words),
        arrangement,
        shape.gpus,
        store_gib,
    )


def _store_words(gib: int) -> tuple[str, ...]:
    return ("--kv-store-size", f"{gib}GiB")
