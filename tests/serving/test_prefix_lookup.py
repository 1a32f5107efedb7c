"""Lookups before routing, and what the store is told of requests that have ended."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from banaserve.kvstore.leases import Lookup
from banaserve.serving.requests import prefix_lookup
from banaserve.serving.requests.prefix_lookup import (
    HoldEnd,
    PrefixLookups,
    PromptHold,
    num_known,
)

_STATES = {"h": Lookup.HIT, "p": Lookup.PENDING, "a": Lookup.ASKED, "m": Lookup.MISS}


@pytest.mark.parametrize(
    ("answers", "expected", "num_looks"),
    [
        (["hhm"], 2, 1),
        (["hpm"], 2, 1),
        (["mha"], 0, 1),
        ([""], 0, 1),
        (["ha", "ha", "hh"], 2, 3),
        (["haa", "hha", "hhm"], 2, 3),
        (["haa", "hma"], 1, 2),
        (["hpa", "hha", "hhp"], 3, 3),
        (["ha"] * 100, 1, 21),  # nobody answers
    ],
)
def test_what_is_asked_elsewhere_is_waited_for_20_ms(
    answers: list[str], expected: int, num_looks: int
) -> None:
    said, time_s, looks = iter(answers), [0.0], [0]

    def look(said: Iterator[str] = said) -> list[Lookup]:
        looks[0] += 1
        return [_STATES[letter] for letter in next(said)]

    def sleep(seconds: float) -> None:
        time_s[0] += seconds * 1.0001

    assert num_known(look, lambda: time_s[0], sleep) == expected
    assert looks == [num_looks]


async def test_holds_that_end_meanwhile_are_not_waited_for(monkeypatch: Any) -> None:
    """A cache is reset once the store knows of earlier ends, however busy the server is."""
    monkeypatch.setattr(prefix_lookup, "_TELL_S", 0.0)
    cluster: Any = SimpleNamespace(instances={})
    lookups, loop = PrefixLookups(cluster), asyncio.get_running_loop()
    told: list[int] = []

    def end_holds(holds: list[HoldEnd]) -> None:
        told.extend(one.hold for one in holds)
        if len(told) < 100:
            loop.call_soon_threadsafe(lookups.end_hold, PromptHold(len(told) + 1, ("",)))

    store: Any = SimpleNamespace(end_holds=end_holds, close=lambda: None)
    lookups.by_weights["w"] = store
    lookups.end_hold(PromptHold(1, ("",)))
    await lookups.told()
    assert told[:1] == [1]
    assert len(told) < 100
    lookups.end_hold(PromptHold(1000, ("",)))
    await lookups.told()
    assert 1000 in told
    lookups.close()
