"""Rebalancing: which streams leave an overloaded instance for one with fewer requests. Pure.

The idea is the live rescheduling of Llumnix (OSDI 2024, section 4.3): a router sees a request once,
when it arrives; what becomes of its instance afterwards is corrected by moving requests. Here a
stream moves through the global store, which has the whole blocks of its KV, so moving costs one
fetch and the computation of its last block.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from math import ceil, floor
from typing import NamedTuple

from banaserve.types import InstanceId, OutputLengths

_USUAL_REMAINING_TOKENS = 100.0


@dataclass(frozen=True, slots=True)
class RebalanceOptions:
    """Options of the rebalancer.

    Attributes:
        interval_s: Time between two decisions.
        threshold: Streams begin to leave an instance with more than so many times its share of
            requests,
        idle_fraction: or while another has less than this part of its share.
        target: They go on leaving until the instance has at most so many times its share.
        least_excess: Number of requests above its share that an overloaded instance has at least.
        cooldown_s: Time for which a stream that has moved stays where it is.
        moved_fraction: Share of an instance's requests that move in one decision at most.
        least_moved: Number of requests that may move in one decision, whatever the share.
        least_gain: Predicted saving of a move of a running stream over its cost, at least.
        max_kv_fraction: Instances whose KV memory is fuller receive no stream.
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
    max_kv_fraction: float = 0.85


class Stream(NamedTuple):
    """A request that decodes, or waits to, and can move.

    Attributes:
        key: Identifies it to the caller.
        tokens: Number of tokens whose KV it would fetch elsewhere.
        is_waiting: Flag: its instance has not computed anything of it yet.
        moved_s: Time of its last move; None if it has not moved.
    """

    key: Hashable
    tokens: int
    is_waiting: bool = False
    moved_s: float | None = None


class DecodeLoad(NamedTuple):
    """Load of an instance that serves decode legs.

    Attributes:
        num_requests: Number of decode and whole requests that it holds, movable or not.
        num_waiting: Number of them that its engine has not put into a batch.
        streams: Returns the requests that can move, the oldest first; called for overloaded
            instances only.
        speed: Speed of its device against the others.
        kv_used_fraction: Share of its KV memory in use, in [0, 1].
        step_s: Time of one of its steps; 0 if not measured.
        growing_fraction: Share of that time that grows with its requests, in [0, 1].
        fetch_token_s: Time to fetch the KV of one token from the store.
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
        now_s: On the clock of ``Stream.moved_s``.
        remaining_tokens: Expected number of output tokens that a running stream still has.
        begun: Instances whose streams left in the last decision.
    """
    total, speed = sum(one.num_requests for one in loads), sum(one.speed for one in loads)
    if len(loads) < 2 or not total or not speed > 0:
        return {}
    share = {one.id: total * one.speed / speed for one in loads}
    room = {
        one.id: max(0, ceil(share[one.id]) - one.num_requests)
        for one in loads
        if one.kv_used_fraction <= options.max_kv_fraction and not one.num_waiting
    }
    has_idle = any(
        room.get(one.id) and one.num_requests < options.idle_fraction * share[one.id]
        for one in loads
    )
    left = sum(room.values())
    receivers = [one for one in loads if room.get(one.id)]
    chosen: dict[InstanceId, list[Stream]] = {}
    for one in sorted(loads, key=lambda load: share[load.id] - load.num_requests):
        excess = one.num_requests - share[one.id]
        begins = has_idle or one.num_requests > options.threshold * share[one.id]
        has_more = one.num_requests > options.target * share[one.id]
        is_overloaded = has_more and (begins or one.id in begun)
        if not left or not receivers or excess < options.least_excess or not is_overloaded:
            continue
        most = max(options.least_moved, floor(options.moved_fraction * one.num_requests))
        most = min(most, floor(excess), left)
        free = [stream for stream in one.streams() if _may_move(stream, now_s, options)]
        waiting = [stream for stream in reversed(free) if stream.is_waiting][: one.num_waiting]
        lightest = min(load.num_requests / load.speed for load in receivers)
        running = sorted(
            (
                s
                for s in free
                if not s.is_waiting and _pays(s, one, lightest, remaining_tokens, options)
            ),
            key=lambda stream: stream.tokens,
        )
        if moved := [*waiting, *running][:most]:
            chosen[one.id] = moved
            left -= len(moved)
    return chosen


def remaining_tokens(lengths: OutputLengths | None) -> float:
    """Return the mean number of output tokens that a stream still has.

    A stream that decodes at some moment has half of its answer left, on average.

    Args:
        lengths: Lengths of the last answers; None before the first has ended.
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
    """Return whether the stream's remaining steps get shorter by more than the move takes."""
    if not source.step_s:
        return True
    relief = 1.0 - (lightest * source.speed + 1) / source.num_requests
    gain_s = remaining_tokens * source.step_s * source.growing_fraction * max(0.0, relief)
    cost_s = (
        stream.tokens * source.fetch_token_s + source.step_s
    )  # one step computes its last block
    return gain_s >= options.least_gain * cost_s
