"""Legs of a request and the candidates for each; the same for every policy."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter
from typing import NamedTuple

from banaserve.base.errors import NoInstanceError, UserError
from banaserve.base.types import ClusterView, InstanceView, RequestView, Role

_ID = attrgetter("id")


class LegReason(StrEnum):
    """Reason for a request's number of legs: the ``reason`` of a route, and a metric's label."""

    TWO_LEGS = "two_legs"
    COLOCATED = "colocated"
    OTHER_ROLE = "other_role"
    SHORT_PROMPT = "short_prompt"
    NO_PREFILL_INSTANCE = "fallback_no_prefill_instance"
    NO_DECODE_INSTANCE = "fallback_no_decode_instance"


@dataclass(frozen=True, slots=True)
class LegOptions:
    """Options of splitting a request into legs.

    Attributes:
        skip_prefill_below_tokens: Maximum number of uncached tokens of a prompt that has no prefill
            leg: the decode instance computes them. At 0, only a fully cached prompt has none.
        fallback: True if, while one role has no ready instance, the other role serves both legs:
            engines know no role, so that this is slower but correct. False: the request fails.
    """

    skip_prefill_below_tokens: int = 0
    fallback: bool = True

    def __post_init__(self) -> None:
        if self.skip_prefill_below_tokens < 0:
            raise UserError(
                f"skip_prefill_below_tokens is {self.skip_prefill_below_tokens}: give 0 or more"
            )


class Legs(NamedTuple):
    """The candidates of each leg, in the order of their ids.

    Attributes:
        prefill: Candidates of the prefill leg; empty if one instance serves both legs.
        decode: Candidates of the decode leg, or of both legs if ``prefill`` is empty; never empty.
    """

    prefill: tuple[InstanceView, ...]
    decode: tuple[InstanceView, ...]
    reason: LegReason


def plan_legs(request: RequestView, cluster: ClusterView, options: LegOptions) -> Legs:
    """Return the legs of ``request`` and the instances that may serve them.

    Colocated instances may serve either leg. Together with prefill or decode instances, they are
    candidates of both legs; if all instances are colocated, there is no hand-over.

    Raises:
        NoInstanceError: A leg has no candidate and no fallback; the message names the missing role.
    """
    prefill, decode, num_colocated = _ready(cluster)
    if not prefill and not decode:
        raise NoInstanceError("no prefill, decode or colocated instance is ready")
    if not decode:
        return _fallback(Role.DECODE, prefill, LegReason.NO_DECODE_INSTANCE, options)
    if num_colocated == len(decode) == len(prefill):
        return Legs((), decode, LegReason.COLOCATED)
    is_short = request.uncached_tokens <= options.skip_prefill_below_tokens
    if is_short or not request.is_splittable:
        return Legs((), decode, LegReason.SHORT_PROMPT)
    if not prefill:
        return _fallback(Role.PREFILL, decode, LegReason.NO_PREFILL_INSTANCE, options)
    return Legs(prefill, decode, LegReason.TWO_LEGS)


def _ready(
    cluster: ClusterView,
) -> tuple[tuple[InstanceView, ...], tuple[InstanceView, ...], int]:
    """Return the ready instances that may prefill, those that may decode, and how many are both."""
    prefill, decode, num_colocated = [], [], 0
    for view in cluster.instances.values():
        if not view.ready:
            continue
        if view.role is Role.PREFILL:
            prefill.append(view)
        elif view.role is Role.DECODE:
            decode.append(view)
        else:
            prefill.append(view)
            decode.append(view)
            num_colocated += 1
    prefill.sort(key=_ID)
    decode.sort(key=_ID)
    return tuple(prefill), tuple(decode), num_colocated


def _fallback(
    missing: Role, others: tuple[InstanceView, ...], reason: LegReason, options: LegOptions
) -> Legs:
    if not options.fallback:
        raise NoInstanceError(f"no {missing.value} instance is ready and the fallback is off")
    return Legs((), others, reason)
