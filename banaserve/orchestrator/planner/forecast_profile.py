"""Profile that a forecast is made with: a given one, or one from reports of the instances.

A profile from a file describes one machine and one model. If the real machine is five times faster,
the same requests look like an overload, which needs another arrangement. After about twenty steps
the instances know their own times, whatever they serve.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from banaserve.base.config.serve_config import ServeConfig
from banaserve.base.types import InstanceFacts, InstanceView
from banaserve.orchestrator.control.costs import profile as profiles
from banaserve.orchestrator.control.costs.profile import (
    DecodeSection,
    MemorySection,
    ModelSection,
    PrefillSection,
    Profile,
)
from banaserve.orchestrator.control.model.learnt_time import StepWork
from banaserve.orchestrator.control.model.moving import Link
from banaserve.orchestrator.control.model.serving_times import assumed_coefficients
from banaserve.orchestrator.planner.options import ElasticOptions

_TYPICAL = StepWork(512, 512**2, 4, 4 * 512)
"""Work by which a machine's speed is judged if only some kinds of work have been observed."""

_LEAST_S = 1e-12

_WEIGHTS_PER_S = 1e10
"""First guess of how fast a step reads the weights, in bytes/s; the first steps correct it."""

_TOKENS_A_READ = 64
"""First guess of how many tokens are computed in the time of reading the weights once."""

_ANY_CONTEXT = 10_000_000


def forecast_profile(config: ServeConfig) -> str:
    """Return the profile's name or file: as given, else the first one of ``--pace``, else empty.

    Without a profile, the instances report their shape and learnt step times: a default profile
    would describe another machine than this one, even if it were of the same model.

    Raises:
        UserError: The profile does not exist, or none is given though modules may move, which
            requires one.
    """
    options = dict(config.orchestrator.options)
    found = str(options.get("profile", next(iter(config.paces), "")))
    if found:
        profiles.load(found)
    ElasticOptions(profile=found, modules=str(options.get("modules", "none")))
    return found


def guessed(facts: InstanceFacts) -> Profile:
    """Return a profile with the shape of ``facts`` whose times are guesses, at best proportional.

    All sizes are in bytes: an element counts as one byte.
    """
    head_bytes = max(1, facts.layer_token_bytes // (2 * facts.num_kv_heads))
    num_heads = facts.num_kv_heads * facts.queries_a_head
    hidden = head_bytes * num_heads
    layer_weights = max(1, facts.layer_weight_bytes)
    weights = facts.num_layers * layer_weights
    read_s = weights / _WEIGHTS_PER_S
    token_s = read_s / _TOKENS_A_READ
    token_bytes = facts.num_layers * facts.layer_token_bytes
    kv_bytes = facts.kv_bytes or facts.memory_bytes - facts.fixed_bytes - weights
    return Profile(
        "learnt",
        "what instances have learnt of their own steps",
        ModelSection(
            facts.num_layers, hidden, num_heads, facts.num_kv_heads, layer_weights, 1,
            _ANY_CONTEXT, element_bytes=1,
        ),
        PrefillSection(read_s, token_s, token_s * hidden / layer_weights),
        DecodeSection(read_s, read_s * token_bytes / weights, token_s),
        None,
        MemorySection(max(1, kv_bytes // token_bytes), facts.block_tokens),
        Link(3e9, 1e-3, 1e-4),
    )  # fmt: skip


def profile_of(options: ElasticOptions, views: Sequence[InstanceView]) -> Profile:
    """Return the profile that ``options`` forecast ``views`` with.

    Raises:
        ValueError: The options name no profile, and no instance reports facts: see ``are_learnt``.
    """
    if options.profile:
        given = profiles.load(options.profile)
    else:
        facts = next((view.facts for view in views if view.facts is not None), None)
        if facts is None:
            raise ValueError("no instance says what it is")
        given = guessed(facts)
    return as_learnt(given, views, options.dilation) if options.are_times_learnt else given


def are_learnt(views: Sequence[InstanceView]) -> bool:
    """Return whether one of ``views`` has facts, and one has learnt step times."""
    is_shaped = any(view.facts is not None for view in views)
    return is_shaped and any(
        view.report is not None and view.report.step_coefficients for view in views
    )


def as_learnt(profile: Profile, views: Sequence[InstanceView], dilation: float = 1.0) -> Profile:
    """Return ``profile`` with the average times and KV room of ``views``.

    The time of a kind of work that no instance has learnt is the profile's time, scaled by the
    ratio of learnt to expected time of the other kinds.

    Args:
        dilation: Seconds of the instances' clock in one second of the profile.
    """
    learnt = [seconds / dilation for seconds in assumed_coefficients(views)][:5]
    if not learnt:
        return profile
    small = profile.decode_small
    assumed = (
        small.fixed_s,
        profile.prefill.token_s,
        profile.prefill.pair_s,
        small.context_token_s,
        small.request_s,
    )
    work = _TYPICAL.features
    seen = [place for place, seconds in enumerate(learnt) if seconds > 0]
    told_s = sum(learnt[place] * work[place] for place in seen)
    expected_s = sum(assumed[place] * work[place] for place in seen)
    ratio = told_s / expected_s if expected_s > 0 else 1.0
    fixed_s, token_s, pair_s, context_s, request_s = (
        own if own > 0 else max(_LEAST_S, guess * ratio)
        for own, guess in zip(learnt, assumed, strict=True)
    )
    rooms = [view.kv_tokens for view in views if view.kv_tokens > 0]
    fetches = [view.report.fetch_token_s for view in views if view.report is not None]
    fetches = [seconds / dilation for seconds in fetches if seconds > 0]
    memory, link = profile.memory, profile.link
    if rooms:
        memory = replace(memory, kv_tokens=sum(rooms) // len(rooms))
    if fetches:
        fetch_token_s = sum(fetches) / len(fetches)
        link = replace(link, bytes_per_s=profile.model.token_bytes / fetch_token_s)
    return replace(
        profile,
        prefill=PrefillSection(fixed_s, token_s, pair_s),
        decode_small=DecodeSection(fixed_s, context_s, request_s),
        decode_large=None,
        memory=memory,
        link=link,
    )
