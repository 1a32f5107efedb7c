"""Which streams leave overloaded instances: never too many, never twice, never for nothing."""

from __future__ import annotations

import random
from collections.abc import Collection
from functools import partial
from typing import Any

import pytest

from banaserve.base.types import InstanceId
from banaserve.orchestrator.control.rebalancing import (
    DecodeLoad,
    RebalanceOptions,
    Stream,
    choose_moves,
)
from depth import seeds

OPTIONS = RebalanceOptions()


def load(name: str, num_requests: int, num_waiting: int = 0, **more: Any) -> DecodeLoad:
    """One whose streams can all move; the last ones to come wait."""
    streams = [
        Stream((name, n), 100 + n, n >= num_requests - num_waiting) for n in range(num_requests)
    ]
    return DecodeLoad(InstanceId(name), num_requests, num_waiting, lambda: streams, **more)


def moved(
    loads: list[DecodeLoad],
    now_s: float = 0.0,
    remaining: float = 100.0,
    begun: Collection[str] = (),
) -> dict[str, int]:
    names = {InstanceId(name) for name in begun}
    chosen = choose_moves(loads, now_s, OPTIONS, remaining, names)
    return {str(name): len(streams) for name, streams in chosen.items()}


def test_a_balanced_load_stays_where_it_is() -> None:
    assert moved([load("d0", 10), load("d1", 11), load("d2", 9)]) == {}
    assert moved([load("d0", 2), load("d1", 0)]) == {}
    assert moved([load("d0", 300)]) == {}
    assert moved([]) == {}


def test_a_burst_on_one_of_three_is_spread_within_five_decisions() -> None:
    counts = {"d0": 300, "d1": 0, "d2": 0}
    begun: dict[str, int] = {}
    for _ in range(5):
        loads = [load(name, count) for name, count in counts.items()]
        begun = moved(loads, begun=begun)
        for source, number in begun.items():
            counts[source] -= number
            for _ in range(number):
                counts[min(counts, key=lambda name: counts[name])] += 1
    assert sum(counts.values()) == 300
    assert max(counts.values()) <= 1.3 * 100


def test_those_that_wait_go_first_and_the_last_to_come_among_them() -> None:
    chosen = choose_moves([load("d0", 20, num_waiting=5), load("d1", 1)], 0.0, OPTIONS, 100.0)
    (streams,) = chosen.values()
    assert [stream.key for stream in streams[:5]] == [("d0", n) for n in (19, 18, 17, 16, 15)]
    assert [stream.tokens for stream in streams[5:]] == sorted(s.tokens for s in streams[5:])


def test_nobody_sends_to_one_whose_requests_wait_or_whose_memory_is_full() -> None:
    assert moved([load("d0", 20), load("d1", 1, num_waiting=1)]) == {}
    assert moved([load("d0", 20), load("d1", 1, kv_used_fraction=0.9)]) == {}


def test_no_more_come_than_leave_the_steps_of_the_receiver_within_the_limit() -> None:
    limits = RebalanceOptions(tpot_s=0.05)
    receiver = load("d1", 1, fixed_s=0.02, request_s=0.001, token_s=1e-5)
    chosen = choose_moves([load("d0", 40), receiver], 0.0, limits, 100.0)
    assert len(chosen[InstanceId("d0")]) == 12, "30 ms, 2.195 ms each, and one is there"
    assert choose_moves([load("d0", 40), receiver._replace(fixed_s=0.06)], 0.0, limits, 9.0) == {}


def test_a_stream_that_has_moved_stays_for_a_while() -> None:
    streams = [Stream(n, 100, moved_s=5.0) for n in range(20)]
    loads = [DecodeLoad(InstanceId("d0"), 20, 0, lambda: streams), load("d1", 0)]
    assert moved(loads, now_s=5.0 + OPTIONS.cooldown_s - 0.1) == {}
    assert moved(loads, now_s=5.0 + OPTIONS.cooldown_s) == {"d0": 8}


def test_a_move_that_takes_longer_than_it_saves_is_left_alone() -> None:
    """100 tokens of 10 ms are left, and steps get nine tenths shorter: at most 0.9 s are won."""
    cheap = load("d0", 20, step_s=0.01, fetch_token_s=1e-5)
    dear = load("d0", 20, step_s=0.01, fetch_token_s=1e-2)
    assert moved([cheap, load("d1", 1)]) == {"d0": 8}
    assert moved([dear, load("d1", 1)]) == {}
    assert moved([cheap, load("d1", 1)], remaining=1.0) == {}
    flat = cheap._replace(growing_fraction=0.0)
    assert moved([flat, load("d1", 1)]) == {}, "steps would be as long as before"


def test_a_faster_device_has_the_larger_share() -> None:
    assert moved([load("d0", 30, speed=3.0), load("d1", 10)]) == {}
    assert moved([load("d0", 12, speed=3.0), load("d1", 20)]) == {"d1": 8}


def test_an_uneven_load_is_left_alone_until_one_is_nearly_idle_and_then_evened_out() -> None:
    uneven = [load("d0", 18), load("d1", 10), load("d2", 8)]
    assert moved(uneven) == {}
    assert moved(uneven, begun=("d0",)) == {"d0": 6}
    assert moved([load("d0", 18), load("d1", 12), load("d2", 2)]) == {"d0": 7}
    assert moved([load("d0", 25), load("d1", 6), load("d2", 6)])["d0"] == 10


@pytest.mark.parametrize("seed", seeds(30, 300))
def test_whatever_the_load_no_move_makes_it_worse(seed: int) -> None:
    draws = random.Random(seed)
    loads = []
    for n in range(draws.randint(1, 6)):
        number = draws.choice((0, 1, 3, draws.randint(0, 400)))
        one = load(f"d{n}", number, draws.randint(0, number), speed=draws.choice((0.5, 1.0, 2.0)))
        kept = [s for s in one.streams() if draws.random() < 0.8]
        loads.append(one._replace(streams=partial(list, kept), kv_used_fraction=draws.random()))
    chosen = choose_moves(loads, 0.0, OPTIONS, draws.uniform(0.0, 500.0))
    total, speed = sum(one.num_requests for one in loads), sum(one.speed for one in loads)
    by_id = {one.id: one for one in loads}
    for source, streams in chosen.items():
        share = total * by_id[source].speed / speed
        assert len(set(streams)) == len(streams) > 0
        assert set(streams) <= set(by_id[source].streams())
        assert by_id[source].num_requests - len(streams) >= share - 1e-9
    room = sum(
        max(0.0, total * one.speed / speed - one.num_requests) + 1
        for one in loads
        if one.id not in chosen
    )
    assert sum(map(len, chosen.values())) <= room
