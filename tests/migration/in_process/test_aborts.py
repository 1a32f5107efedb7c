"""Moves given up before COMMIT leave no trace, whatever moves."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import pytest

from rig import all_kinds, modules_of

pytestmark = [pytest.mark.e2e, pytest.mark.spine]

ENGINE = "mixtral"
NUM_TOKENS = 24


def sample(kind: str) -> dict[str, Any]:
    """A unit of a kind."""
    some = {1: (0, 2), 5: (1,)}
    return modules_of(kind, layers=(2, 4), heads=some, experts=some)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Short ones, and a long one of several blocks."""
    story = [(19 * i + i * i) % 2000 + 5 for i in range(300)]
    return [story[3:8], story, story[40:50]]


@pytest.fixture(scope="module")
def expected(rig: Any, prompts: list[list[int]]) -> Any:
    return rig.run(prompts, NUM_TOKENS)


@pytest.fixture(autouse=True)
def _home(rig: Any, expected: Any) -> Iterator[None]:
    yield
    rig.reset()


@pytest.mark.parametrize("kind", all_kinds())
@pytest.mark.parametrize(
    "last_phase",
    [
        pytest.param("preparing", marks=pytest.mark.long),
        pytest.param("prepared", marks=pytest.mark.long),
        "copied",
    ],
)
def test_abort_leaves_the_host_as_it_was(
    rig: Any, prompts: list[list[int]], expected: Any, let_pass: Any, last_phase: str, kind: str
) -> None:
    guest, move_id = rig.guest(), rig.new_move()

    def travel() -> Generator[None, None, None]:
        yield from let_pass(3)
        rig.do("prepare", move_id, sample(kind), guest)
        if last_phase != "preparing":
            yield from rig.wait(move_id, "prepared")
        if last_phase == "copied":
            rig.do("precopy", move_id)
            yield from rig.wait(move_id, "copied")
        rig.do("abort", move_id)
        assert rig.ask("commit", move_id)["error"]

    assert rig.agrees(rig.run(prompts, NUM_TOKENS, travel()), expected)
    assert rig.phase(move_id) == "aborted"
    # Nothing of it is left: the same modules can move again.
    assert rig.agrees(rig.run(prompts, NUM_TOKENS, rig.away(sample(kind), rig.guest())), expected)
