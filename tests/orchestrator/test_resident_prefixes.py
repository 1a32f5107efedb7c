"""What a router knows of the KV in the engines' own caches."""

from __future__ import annotations

import random

import pytest

from banaserve.base.types import InstanceId
from banaserve.orchestrator.control.model.resident_prefixes import ResidentPrefixes
from banaserve.orchestrator.control.model.serving_times import LegLoad
from depth import seeds

A, B = InstanceId("a"), InstanceId("b")
BLOCK = 4
ROOM = 1000


def held(*computed: tuple[InstanceId, str, int], room: int = ROOM) -> ResidentPrefixes:
    """After instances have computed so many tokens of what begins like ``tokens`` of a root."""
    found = ResidentPrefixes(BLOCK)
    for instance, root, count in computed:
        found.add(instance, root, tokens(count), room)
    return found


def tokens(count: int, first: int = 0) -> list[int]:
    return list(range(first, first + count))


@pytest.mark.parametrize(
    ("prefixes", "root", "asked", "wanted"),
    [
        (held(), "", tokens(8), {}),
        (held((A, "", 8)), "", tokens(8), {A: 8}),
        # Whole blocks alone are kept and found.
        (held((A, "", 11)), "", tokens(100), {A: 8}),
        (held((A, "", 100)), "", tokens(7), {A: 4}),
        (held((A, "", 3)), "", tokens(100), {}),
        # Each has what it has.
        (held((A, "", 4), (B, "", 12)), "", tokens(12), {A: 4, B: 12}),
        # Other tenants, other tokens.
        (held((A, "theirs", 8)), "ours", tokens(8), {}),
        (held((A, "", 8)), "", tokens(8, first=1), {}),
        (held((A, "", 8)), "", [*tokens(4), 99, *tokens(3, first=5)], {A: 4}),
        # The end of a prompt goes before its beginning.
        (held((A, "", 40), room=12), "", tokens(40), {A: 12}),
        (held((A, "", 40), room=3), "", tokens(40), {}),
        (held((A, "x", 12), (A, "y", 8), room=12), "x", tokens(12), {A: 4}),
        # What was used last stays.
        (held((A, "x", 8), (A, "y", 8), (A, "x", 8), room=8), "x", tokens(8), {A: 8}),
    ],
)
def test_a_prefix_is_found_where_it_was_computed(
    prefixes: ResidentPrefixes, root: str, asked: list[int], wanted: dict[InstanceId, int]
) -> None:
    assert prefixes.found(root, asked) == wanted


def test_what_an_instance_loses_is_found_no_more() -> None:
    prefixes = held((A, "", 8), (B, "", 8))
    prefixes.forget(A)
    assert prefixes.found("", tokens(8)) == {B: 8}
    prefixes.forget()
    assert prefixes.found("", tokens(8)) == {}


@pytest.mark.parametrize("seed", seeds(20, 20))
def test_never_more_is_found_than_was_computed(seed: int) -> None:
    draws = random.Random(seed)
    prefixes, computed = ResidentPrefixes(BLOCK), []
    for _ in range(30):
        instance = draws.choice((A, B))
        # Few values, so that prompts share beginnings of all lengths.
        prompt = [draws.randrange(2) for _ in range(draws.randrange(1, 30))]
        longest = {
            name: max((common(prompt, old) for where, old in computed if where == name), default=0)
            for name in (A, B)
        }
        wanted = {name: count - count % BLOCK for name, count in longest.items() if count >= BLOCK}
        assert prefixes.found("", prompt) == wanted
        prefixes.add(instance, "", prompt, 10_000)
        computed.append((instance, prompt))


def common(one: list[int], other: list[int]) -> int:
    """Length of their common prefix."""
    found = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        found += 1
    return found


@pytest.mark.parametrize(
    ("leg", "resident", "wanted"),
    [
        (LegLoad(100, 0, 5), 60, LegLoad(40, 0, 5, 60)),
        # What lies there need not be fetched, and the store has the rest.
        (LegLoad(40, 60, 5), 20, LegLoad(40, 40, 5, 20)),
        (LegLoad(40, 60, 5), 80, LegLoad(20, 0, 5, 80)),
        # The last token is always computed.
        (LegLoad(100, 0, 5), 100, LegLoad(1, 0, 5, 99)),
        (LegLoad(100, 0, 5), 300, LegLoad(1, 0, 5, 99)),
    ],
)
def test_a_leg_is_smaller_where_its_prompt_lies(
    leg: LegLoad, resident: int, wanted: LegLoad
) -> None:
    found = leg.where(resident)
    assert found == wanted
    assert found.prompt == leg.prompt
    assert found.pairs == found.to_compute * (2 * leg.prompt - found.to_compute)
