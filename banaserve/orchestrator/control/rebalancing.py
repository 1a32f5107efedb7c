"""Rebalancing: which streams leave an overloaded instance for one with fewer requests. Pure.

The idea is the live rescheduling of Llumnix (OSDI 2024, section 4.3): a router sees a request once,
when it arrives; later changes of its instance's load are corrected by moving requests. Here a
stream moves through the global store, which has the whole blocks of its KV, so moving costs one
fetch and the computation of its last block.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from math import ceil, floor
from typing import NamedTuple

from banaserve.base.types import InstanceId, InstanceView, OutputLengths, Role

_USUAL_REMAINING_TOKENS = 100.0


@dataclass(frozen=True, slots=True)
class RebalanceOptions:
    """Options of the rebalancer.

    With a limit of the time per token, instances that also compute prompts are left to the router,
    which checks each request against the limits and may load one of them more on purpose.

    Attributes:
        interval_s: Time between two decisions.
        threshold: Multiple of its share of requests above which streams begin to leave an instance.
        idle_fraction: Part of its share below which an instance is nearly idle: then streams leave
            every instance that is above ``target``.
        target: Multiple of its share above which streams continue to leave, once they have begun.
        least_excess: Minimum number of requests above its share of an overloaded instance.
        cooldown_s: Time after a move in which a stream does not move again, in seconds.
        moved_fraction: Maximum share of an instance's requests that move in one decision.
        least_moved: Number of requests that may move in one decision, whatever the share.
        least_gain: Minimum ratio of predicted saving to cost for a move of a running stream.
        tpot_s: Limit of the time between two tokens, in seconds, which streams that arrive at an
            instance must not exceed; 0 is no limit.
        max_kv_fraction: Use of KV memory above which an instance receives no stream, in [0, 1].
    """

    interval_s: float = 1.0
    threshold: float = 2.0
    idle_fraction: float = 0.2
    target: float = 1.25
    least_excess: int = 3
    cooldown_s: float = 10.0
    moved_fraction: float = 0.4
    least_moved: int = 8
    least_gain: float = 2.0
    tpot_s: float = 0.0
    max_kv_fraction: float = 0.85

    @property
    def roles(self) -> tuple[Role, ...]:
        """Roles whose instances are balanced, each role by itself."""
        return (Role.DECODE,) if self.tpot_s else (Role.DECODE, Role.COLOCATED)


class Stream(NamedTuple):
    """A request that decodes, or waits to, and can move.

    Attributes:
        key: Key by which the caller identifies the stream.
        tokens: Number of tokens whose KV another instance would fetch.
        is_waiting: True if its instance has not computed anything of it yet.
        moved_s: Time of its last move; None if it has not moved.
    """

    key: Hashable
    tokens: int
    is_waiting: bool = False
    moved_s: float | None = None


class DecodeLoad(NamedTuple):
    """Load of an instance that serves decode legs.

    Attributes:
        num_requests: Number of requests that it holds whose prompts are computed.
        num_waiting: Number of these requests that its engine has not put into a batch.
        streams: Function that returns the requests that can move, the oldest first; called for
            overloaded instances only.
        speed: Speed of its device relative to the others.
        kv_used_fraction: Share of its KV memory in use, in [0, 1].
        step_s: Time of one of its steps, in seconds; 0 if not measured.
        growing_fraction: Share of that time that grows with its requests, in [0, 1].
        fetch_token_s: Time to fetch the KV of one token from the store, in seconds.
        fixed_s, request_s, token_s: Time of a step without requests, and the time that each request
            and each token of its KV adds, in seconds; 0 if not learnt.
    """

    id: InstanceId
    num_requests: int
    num_waiting: int
    streams: Callable[[], Sequence[Stream]]
    speed: float = 1.0
    kv_used_fraction: float = 0.0
    step_s: float = 0.0
    growing_fraction: float = 1.0
    fetch_token_s: float = 0.0
    fixed_s: float = 0.0
    request_s: float = 0.0
    token_s: float = 0.0


def decode_load_of(
    view: InstanceView, num_requests: int, streams: Callable[[], Sequence[Stream]]
) -> DecodeLoad:
    """Return the load of an instance by its last report.

    Args:
        num_requests, streams: Fields of ``DecodeLoad``.
    """
    report, speed = view.report, view.facts.speed if view.facts is not None else 1.0
    if report is None:
        return DecodeLoad(view.id, num_requests, 0, streams, speed)
    fixed_s, _, _, token_s, request_s, *_ = report.step_coefficients or (0.0,) * 5
    return DecodeLoad(
        view.id,
        num_requests,
        report.num_waiting,
        streams,
        speed,
        report.kv_used_fraction,
        report.step_s,
        report.step_fill_fraction,
        report.fetch_token_s,
        fixed_s,
        request_s,
        token_s,
    )


def choose_moves(
    loads: Sequence[DecodeLoad],
    now_s: float,
    options: RebalanceOptions,
    remaining_tokens: float,
    begun: Collection[InstanceId] = (),
) -> dict[InstanceId, list[Stream]]:
    """Return the streams that leave each instance; empty if the load is balanced.

    Streams that wait go first, since moving them costs nothing; then running streams with the
    least KV, if the steps that they save are worth ``least_gain`` times the fetch.

    Args:
        loads: All ready instances that serve decode legs.
        now_s: Present time, on the clock of ``Stream.moved_s``.
        remaining_tokens: Expected number of output tokens that a running stream still generates.
        begun: Instances whose streams left in the last decision.
    """
    total, speed = sum(one.num_requests for one in loads), sum(one.speed for one in loads)
    if len(loads) < 2 or not total or not speed > 0:
        return {}
    share = {one.id: total * one.speed / speed for one in loads}
    receivers = [
        one
        for one in loads
        if one.num_requests < ceil(share[one.id])
        and one.kv_used_fraction <= options.max_kv_fraction
        and not one.num_waiting
    ]
    has_idle = any(one.num_requests < options.idle_fraction * share[one.id] for one in receivers)
    sources = [
        one
        for one in loads
        if receivers
        and one.num_requests - share[one.id] >= options.least_excess
        and one.num_requests > options.target * share[one.id]
        and (has_idle or one.id in begun or one.num_requests > options.threshold * share[one.id])
    ]
    free = {
        one.id: [stream for stream in one.streams() if _may_move(stream, now_s, options)]
        for one in sources
    }
    tokens = [stream.tokens for streams in free.values() for stream in streams]
    if not tokens:
        return {}
    context = sum(tokens) / len(tokens)
    left = sum(_room(one, share[one.id], context, options.tpot_s) for one in receivers)
    lightest = min(one.num_requests / one.speed for one in receivers)
    chosen: dict[InstanceId, list[Stream]] = {}
    for one in sorted(sources, key=lambda load: share[load.id] - load.num_requests):
        most = max(options.least_moved, floor(options.moved_fraction * one.num_requests))
        most = min(most, floor(one.num_requests - share[one.id]), left)
        streams = free[one.id]
        waiting = [stream for stream in reversed(streams) if stream.is_waiting][: one.num_waiting]
        running = sorted(
            (
                s
                for s in streams
                if not s.is_waiting and _pays(s, one, lightest, remaining_tokens, options)
            ),
            key=lambda stream: stream.tokens,
        )
        if moved := [*waiting, *running][:most]:
            chosen[one.id] = moved
            left -= len(moved)
    return chosen


def _room(receiver: DecodeLoad, share: float, context: float, tpot_s: float) -> int:
    """Return the number of streams of ``context`` tokens that ``receiver`` may get.

    With them, the receiver has at most its share of the requests, and its steps keep the limit.
    """
    room = ceil(share) - receiver.num_requests
    each_s = receiver.request_s + context * receiver.token_s
    if tpot_s and each_s > 0:
        within = floor((tpot_s - receiver.fixed_s) / each_s)
        room = min(room, within - receiver.num_requests)
    return max(0, room)


def remaining_tokens(lengths: OutputLengths | None) -> float:
    """Return the mean number of output tokens that a stream still generates.

    A stream that decodes at some moment has half of its output left, on average.

    Args:
        lengths: Lengths of recent outputs; None before the first request has ended.
    """
    if lengths is None:
        return _USUAL_REMAINING_TOKENS
    return sum(lengths.present_tokens) / len(lengths.present_tokens) / 2


def _may_move(stream: Stream, now_s: float, options: RebalanceOptions) -> bool:
    return stream.moved_s is None or now_s - stream.moved_s >= options.cooldown_s


def _pays(
    stream: Stream,
    source: DecodeLoad,
    lightest: float,
    remaining_tokens: float,
    options: RebalanceOptions,
) -> bool:
    """Return whether the remaining steps save at least ``least_gain`` times the cost of a move."""
    if not source.step_s:
        return True
    relief = 1.0 - (lightest * source.speed + 1) / source.num_requests
    gain_s = remaining_tokens * source.step_s * source.growing_fraction * max(0.0, relief)
    cost_s = (
        stream.tokens * source.fetch_token_s + source.step_s
    )  # one step computes its last block
    return gain_s >= options.least_gain * cost_s
