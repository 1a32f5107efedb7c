"""Unlike devices of one cluster: their profiles of the same model, and their speeds."""

from __future__ import annotations

from functools import lru_cache
from math import sqrt

from banaserve.base.errors import UserError
from banaserve.orchestrator.control.costs.profile import Profile, load
from banaserve.orchestrator.control.costs.steps import StepCosts

_PREFILL_TOKENS = 2048
_DECODE_REQUESTS, _CONTEXT_TOKENS = 32, 1000
_load = lru_cache(maxsize=64)(load)


def device_of(name: str, usual: Profile) -> Profile:
    """Return the profile ``name`` of an instance in a cluster that mostly has ``usual``.

    Raises:
        UserError: The profile does not exist, or has another model or another block size.
    """
    own = _load(name)
    if own.model != usual.model:
        raise UserError(
            f"{own.name} and {usual.name} are profiles of two models: instances of one server "
            "serve the same"
        )
    if own.memory.block_tokens != usual.memory.block_tokens:
        raise UserError(
            f"{own.name} has blocks of {own.memory.block_tokens} tokens, {usual.name} of "
            f"{usual.memory.block_tokens}: instances of one server share blocks"
        )
    return own


def relative_speed(profile: Profile, usual: Profile) -> float:
    """Return a device's speed relative to ``usual``: geometric mean of prefill and decode steps."""
    (own_prefill_s, own_decode_s), (prefill_s, decode_s) = _steps(profile), _steps(usual)
    return sqrt(prefill_s / own_prefill_s * (decode_s / own_decode_s))


def _steps(profile: Profile) -> tuple[float, float]:
    costs = StepCosts(profile)
    prefill_s, _ = costs.mixed_s(_PREFILL_TOKENS, _PREFILL_TOKENS**2, 0, 0)
    context = _DECODE_REQUESTS * _CONTEXT_TOKENS
    decode_s, _ = costs.mixed_s(0, 0, _DECODE_REQUESTS, context)
    return prefill_s, decode_s
