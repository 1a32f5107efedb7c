"""Costs and relief of modules that run at a guest, in a profile's time."""

from __future__ import annotations

from banaserve.base.types import Distance, Module
from banaserve.orchestrator.control.costs.profile import Profile
from banaserve.orchestrator.control.model import moving, overlapping
from banaserve.orchestrator.control.model.learnt_time import LearntTime, StepWork, step_time
from banaserve.orchestrator.control.projection import slabs

_MAX_PARTS = 32
"""Maximum number of micro-batches of a step, the default of an engine."""


def attention_fraction(profile: Profile, work: StepWork) -> float:
    """Return the share of a step of ``work`` that is attention and moves with heads, in [0, 1]."""
    context_s = work.context_tokens * profile.decode(int(work.decode_requests)).context_token_s
    attention_s = work.prefill_pairs * profile.prefill.pair_s + context_s
    step_s = _model(profile, work).predict_s(work.features)
    return attention_s / step_s if step_s > 0 else 0.0


def relief(profile: Profile, module: Module, work: StepWork) -> float:
    """Return the share of a step of ``work`` that its host saves with ``module`` away, in [0, 1].

    Host and guest compute layers concurrently as far as the step can be cut into micro-batches.
    They always compute heads concurrently: the host computes each layer's other heads while the
    guest computes the moved ones.
    """
    own = slabs.compute_share(profile.facts, module, attention_fraction(profile, work))
    if module.heads:
        return own
    return own * overlapping.overlap_fraction(_model(profile, work), work, _MAX_PARTS)


def _model(profile: Profile, work: StepWork) -> LearntTime:
    """Return step times near ``work``; a step of prompts and decoding has the larger fixed part."""
    prefill, decode = profile.prefill, profile.decode(int(work.decode_requests))
    fixed_s = decode.fixed_s
    if work.prefill_tokens:
        fixed_s = max(prefill.fixed_s, decode.fixed_s if work.decode_requests else 0.0)
    return step_time(
        fixed_s, prefill.token_s, prefill.pair_s, decode.context_token_s, decode.request_s
    )


def hop_s(profile: Profile, module: Module, tokens: int, distance: Distance | None = None) -> float:
    """Return the time that messages to and from a remote module add to a step, in seconds.

    Args:
        distance: Network path to the guest's machine; None if the guest is on the same machine.
    """
    link = profile.link.over(distance)
    return moving.hop_s(profile.facts, module, tokens, link)
