"""Tokens and logprobs do not change, whatever moves and whenever; greedy, float32."""

from __future__ import annotations

import random
from collections.abc import Generator, Iterator
from typing import Any

import pytest

from depth import chosen_seed

pytestmark = [pytest.mark.e2e, pytest.mark.spine]

ENGINE = "llama"
NUM_TOKENS = 48
NUM_LAYERS, NUM_KV_HEADS = 6, 3
LAYERS = {"type": "layers", "start": 2, "end": 4}
HEADS = {"type": "heads", "heads": [[0, [1]], [1, [0, 2]], [5, [0, 1, 2]]]}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Short ones, and a long one of several chunks and blocks."""
    story = [(11 * i + i * i) % 2000 + 5 for i in range(430)]
    return [story[3:8], story[40:50], story[100:109], story, story[200:207]]


@pytest.fixture(scope="module")
def expected(rig: Any, prompts: list[list[int]]) -> Any:
    """Of the same engine before anything has moved, with the long prompt's blocks cached."""
    first = rig.run(prompts, NUM_TOKENS)
    again = rig.run(prompts, NUM_TOKENS)
    assert rig.agrees(first, again)
    assert rig.agrees(rig.run(prompts, NUM_TOKENS), again), "the engine does not repeat itself"
    return again


@pytest.fixture(autouse=True)
def _home(rig: Any, expected: Any) -> Iterator[None]:
    yield
    rig.reset()


def test_the_time_hook_is_told_what_a_move_has_done(
    rig: Any, prompts: list[list[int]], expected: Any
) -> None:
    from rig import unit_of

    pieces = rig.pieces
    before_bytes, before = pieces.num_bytes, pieces.num_commits
    assert rig.agrees(rig.run(prompts, NUM_TOKENS, rig.away(LAYERS, rig.guest())), expected)
    assert pieces.built_modules[-1] == unit_of(LAYERS)
    (unit,) = rig.do("status")["units"]
    facts = rig.do("status")["moves"][unit["unit_id"]]["facts"]
    copied_bytes = facts.get("precopy_bytes", 0) + facts["commit_bytes"]
    assert pieces.num_bytes - before_bytes == copied_bytes == facts["planned_bytes"] > 0
    assert pieces.num_commits == before + 1


def test_heads_and_layers_at_once(
    rig: Any, prompts: list[list[int]], expected: Any, let_pass: Any
) -> None:
    one, other = rig.guest(), rig.guest()
    more = {"type": "heads", "heads": [[0, [2]], [4, [2]]]}

    def travel() -> Generator[None, None, None]:
        yield from let_pass(2)
        yield from rig.away(HEADS, one, gap=1)
        yield from rig.away(LAYERS, other, gap=1)
        yield from rig.away(more, one, free=False)

    assert rig.agrees(rig.run(prompts, NUM_TOKENS, travel()), expected)
    assert len(rig.do("status")["units"]) == 3
    assert rig.agrees(rig.run(prompts, NUM_TOKENS), expected), "wholly remote"

    def home() -> Generator[None, None, None]:
        for unit in rig.do("status")["units"]:
            yield from rig.on(unit["unit_id"], gap=1)

    assert rig.agrees(rig.run(prompts, NUM_TOKENS, home()), expected)


def test_a_seeded_request_goes_on(rig: Any, prompts: list[list[int]]) -> None:
    seeded = {"temperature": 0.8, "seed": 7}
    expected = rig.run(prompts, NUM_TOKENS, **seeded)
    answers = rig.run(prompts, NUM_TOKENS, rig.away(HEADS, rig.guest(), gap=2), **seeded)
    assert rig.agrees(answers, expected)


def test_random_plans_at_random_moments(
    rig: Any, prompts: list[list[int]], expected: Any, let_pass: Any
) -> None:
    dice = random.Random(chosen_seed(20))
    for _ in range(4):
        guest = rig.guest()
        start = dice.randrange(0, NUM_LAYERS - 1)
        plan = {"type": "layers", "start": start, "end": dice.randrange(start + 1, NUM_LAYERS)}
        if dice.random() < 0.5:
            layers = dice.sample(range(NUM_LAYERS), 3)
            pick = [
                [n, sorted(dice.sample(range(NUM_KV_HEADS), dice.randint(1, 3)))] for n in layers
            ]
            plan = {"type": "heads", "heads": pick}

        def travel(plan: Any = plan, guest: str = guest) -> Generator[None, None, None]:
            yield from let_pass(dice.randrange(8))
            yield from rig.away(plan, guest, free=dice.random() < 0.5, gap=dice.randrange(4))
            yield from let_pass(dice.randrange(8))
            for unit in rig.do("status")["units"]:
                yield from rig.on(unit["unit_id"], gap=dice.randrange(3))

        assert rig.agrees(rig.run(prompts, NUM_TOKENS, travel()), expected), plan
        rig.give_back(guest)


@pytest.mark.parametrize(
    ("modules", "why"),
    [
        ({"type": "layers", "start": 5, "end": 5}, "empty"),
        ({"type": "layers", "start": 5, "end": 7}, "outside"),
        ({"type": "heads", "heads": []}, "no heads"),
        ({"type": "heads", "heads": [[1, [3]]]}, "no KV head 3"),
        ({"type": "heads", "heads": [[6, [0]]]}, "no layer 6"),
        ({"type": "heads", "heads": [[1, [1, 1]]]}, "twice"),
        ({"type": "heads", "heads": [[2, [1]]]}, "layer 2"),
        ({"type": "layers", "start": 3, "end": 5}, "layer 3"),
    ],
)
def test_what_cannot_move_is_refused_in_words(rig: Any, modules: dict[str, Any], why: str) -> None:
    guest = rig.guest()
    rig.finish(rig.away(LAYERS, guest))
    epoch = rig.do("status")["epoch"]
    reply = rig.ask("prepare", rig.new_move(), modules, guest)
    assert why in reply["error"], reply
    assert rig.do("status")["epoch"] == epoch


def test_unknown_things_are_refused(rig: Any) -> None:
    assert "not attached" in rig.ask("prepare", rig.new_move(), LAYERS, "nobody")["error"]
    assert "no move" in rig.ask("commit", "nothing")["error"]
    assert "not away" in rig.ask("move_on", rig.new_move(), "nothing")["error"]
    serving = rig.guest()
    rig.finish(rig.away(LAYERS, serving))
    move_id = rig.new_move()
    rig.do("prepare", move_id, {"type": "layers", "start": 4, "end": 5}, serving)
    assert rig.settled(move_id) == "failed"
    assert "start another" in rig.do("status")["moves"][move_id]["reason"]
