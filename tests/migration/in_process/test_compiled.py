"""A compiled model: its graphs run but while something stands in the place of its modules."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import pytest

from rig import modules_of

pytestmark = pytest.mark.e2e

ENGINE = "mixtral, compiled"
NUM_TOKENS = 24
SOME = {1: (0, 2), 5: (1,)}
# Whether graphs go on: they only name attentions.
KINDS = {"layers": False, "heads": True, "context": True, "experts": False}


def sample(kind: str) -> dict[str, Any]:
    """A unit of a kind."""
    return modules_of(kind, layers=(2, 4), heads=SOME, experts=SOME)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Short ones, and one of several blocks."""
    story = [(19 * i + i * i) % 2000 + 5 for i in range(300)]
    return [story[3:8], story, story[40:80]]


@pytest.fixture(scope="module")
def expected(rig: Any, prompts: list[list[int]]) -> Any:
    return rig.run(prompts, NUM_TOKENS)


@pytest.fixture(autouse=True)
def _home(rig: Any, expected: Any) -> Iterator[None]:
    yield
    rig.reset()


@pytest.fixture
def calls(rig: Any) -> Iterator[list[int]]:
    """One for each time that Python calls a layer which is always at home."""
    seen: list[int] = []
    handle = rig.host.engine.layers[0].register_forward_pre_hook(lambda *_: seen.append(1))
    yield seen
    handle.remove()


@pytest.mark.parametrize(
    "kind",
    [
        "layers",
        pytest.param("heads", marks=pytest.mark.long),
        pytest.param("context", marks=pytest.mark.long),
        "experts",
    ],
)
def test_tokens_are_equal_and_graphs_come_back(
    rig: Any, prompts: list[list[int]], expected: Any, let_pass: Any, kind: str, calls: list[int]
) -> None:
    def travel() -> Generator[None, None, None]:
        yield from let_pass(3)
        yield from rig.away(sample(kind), rig.guest(), gap=2)

    assert rig.agrees(rig.run(prompts, NUM_TOKENS), expected)
    assert calls == [], "graphs run at home"
    assert rig.agrees(rig.run(prompts, NUM_TOKENS, travel()), expected)
    calls.clear()
    assert rig.agrees(rig.run(prompts, NUM_TOKENS), expected), "wholly remote"
    assert bool(calls) is not KINDS[kind]
    (unit,) = rig.do("status")["units"]
    assert rig.agrees(rig.run(prompts, NUM_TOKENS, rig.on(unit["unit_id"], gap=2)), expected)
    calls.clear()
    assert rig.agrees(rig.run(prompts, NUM_TOKENS), expected), "after the return"
    assert calls == [], "graphs run again"


def test_a_lost_guest_brings_the_graphs_back(
    rig: Any, prompts: list[list[int]], expected: Any, let_pass: Any, calls: list[int]
) -> None:
    guest = rig.guest()

    def lose() -> Generator[None, None, None]:
        yield from rig.away(sample("layers"), guest)
        yield from let_pass(4)
        rig.kill(guest)

    assert rig.agrees(rig.run(prompts, NUM_TOKENS, lose()), expected)
    assert calls
    calls.clear()
    assert rig.agrees(rig.run(prompts, NUM_TOKENS), expected)
    assert calls == []


def test_counted_choices_are_those_of_modules(
    rig: Any, prompts: list[list[int]], expected: Any, calls: list[int]
) -> None:
    rig.do("experts", True)
    assert rig.agrees(rig.run(prompts, NUM_TOKENS), expected)
    counted = rig.do("experts", False)
    assert sum(counted[1]) > 0
    calls.clear()
    assert rig.agrees(rig.run(prompts, NUM_TOKENS), expected)
    assert calls == []
