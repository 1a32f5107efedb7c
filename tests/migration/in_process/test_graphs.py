"""CUDA graphs, recorded on a CPU: those at home are kept, and others captured for what is away."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import pytest

from banaserve.migration.modules.step_graphs import WANTED_STEPS
from recorded_graphs import SIZES
from rig import modules_of

pytestmark = pytest.mark.e2e

ENGINE = "mixtral, graphs"
NUM_TOKENS = 32
SOME = {1: (0, 2), 5: (1,)}
# Whether the graphs at home stay in use: attention is a break in them already.
KINDS = {"layers": False, "heads": True, "context": True, "experts": False}


def sample(kind: str) -> dict[str, Any]:
    """A unit of a kind."""
    return modules_of(kind, layers=(2, 4), heads=SOME, experts=SOME)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Short ones, and one of several blocks; three sequences are padded to four."""
    story = [(19 * i + i * i) % 2000 + 5 for i in range(300)]
    return [story[3:8], story, story[40:80]]


@pytest.fixture(scope="module")
def expected(rig: Any, prompts: list[list[int]]) -> Any:
    """What the same engine answers without any graph."""
    graphs = rig.host.engine.graphs
    graphs.replace(frozenset({"nothing"}))
    graphs._has_failed = True  # captures none
    answers = rig.run(prompts, NUM_TOKENS)
    graphs.replace(frozenset())
    return answers


@pytest.fixture(autouse=True)
def _home(rig: Any, expected: Any) -> Iterator[None]:
    yield
    rig.reset()


@pytest.fixture
def eager(rig: Any) -> Iterator[list[int]]:
    """The numbers of tokens of small steps in which Python calls a layer that is always at home."""
    seen: list[int] = []

    def called(_: Any, args: Any, kwargs: Any) -> None:
        hidden = kwargs.get("hidden_states", args[1] if len(args) > 1 else None)
        if len(hidden) <= SIZES[-1] and not rig.host.engine.graphs._is_capturing:
            seen.append(len(hidden))

    handle = rig.host.engine.layers[0].register_forward_pre_hook(called, with_kwargs=True)
    yield seen
    handle.remove()


@pytest.mark.parametrize("kind", list(KINDS))
def test_tokens_are_equal_and_graphs_go_on(
    rig: Any, prompts: list[list[int]], expected: Any, let_pass: Any, kind: str, eager: list[int]
) -> None:
    graphs = rig.host.engine.graphs
    before = graphs.num_captured

    def travel() -> Generator[None, None, None]:
        yield from let_pass(3)
        yield from rig.away(sample(kind), rig.guest(), gap=2)

    assert rig.agrees(rig.run(prompts, NUM_TOKENS), expected)
    assert eager == [], "graphs run at home"
    assert rig.agrees(rig.run(prompts, NUM_TOKENS, travel()), expected)
    assert rig.agrees(rig.run(prompts, NUM_TOKENS), expected), "wholly remote"
    if KINDS[kind]:
        assert eager == [], "the same graphs"
        assert graphs.num_captured == before
    else:
        assert 3 in eager, "until a graph is captured, without the padding"
        assert eager.count(3) <= WANTED_STEPS
        assert graphs.num_captured > before
    (unit,) = rig.do("status")["units"]
    assert rig.agrees(rig.run(prompts, NUM_TOKENS, rig.on(unit["unit_id"], gap=2)), expected)
    eager.clear()
    captured = graphs.num_captured
    assert rig.agrees(rig.run(prompts, NUM_TOKENS), expected), "after the return"
    assert (eager, graphs.num_captured) == ([], captured), "the graphs at home, at once"


def test_the_next_guest_is_asked_by_the_same_graphs(
    rig: Any, prompts: list[list[int]], expected: Any, eager: list[int]
) -> None:
    rig.finish(rig.away(sample("layers"), rig.guest()))
    assert rig.agrees(rig.run(prompts, NUM_TOKENS), expected)
    (unit,) = rig.do("status")["units"]
    rig.finish(rig.on(unit["unit_id"], rig.guest()))
    eager.clear()
    assert rig.agrees(rig.run(prompts, NUM_TOKENS), expected)
    assert 3 not in eager


def test_a_lost_guest_brings_the_graphs_back(
    rig: Any, prompts: list[list[int]], expected: Any, let_pass: Any, eager: list[int]
) -> None:
    guest = rig.guest()

    def lose() -> Generator[None, None, None]:
        yield from rig.away(sample("layers"), guest)
        yield from let_pass(WANTED_STEPS + 6)
        assert 4 in rig.do("status")["graph_sizes"]
        rig.kill(guest)

    assert rig.agrees(rig.run(prompts, NUM_TOKENS, lose()), expected)
    assert rig.do("status")["guests_lost"]
    eager.clear()
    assert rig.agrees(rig.run(prompts, NUM_TOKENS), expected)
    assert eager == []


def test_experts_are_counted_in_graphs_too(
    rig: Any, prompts: list[list[int]], expected: Any, eager: list[int]
) -> None:
    rig.do("experts", True)
    assert rig.agrees(rig.run(prompts, NUM_TOKENS, salt="none is cached"), expected)
    counted = rig.do("experts", False)
    num_tokens = sum(map(len, prompts)) + len(prompts) * (NUM_TOKENS - 1)
    assert sum(counted[1]) == 2 * num_tokens, "two of each token, and none of the padding"
    eager.clear()
    assert rig.agrees(rig.run(prompts, NUM_TOKENS), expected)
    assert eager == []
