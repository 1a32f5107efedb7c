"""What every registered kind of unit can do, with equal tokens; greedy, float32, real model."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import pytest

from banaserve import models
from rig import all_kinds, modules_of

pytestmark = pytest.mark.e2e

NUM_TOKENS = 48
TEXTS = (
    "The capital of France is",
    "Once upon a time there was a little girl who",
    "List the planets of the solar system in order:",
    "The history of the Roman Empire began " + "and then the empire grew larger. " * 60,
    "def fibonacci(n):",
)


def sample(kind: str) -> dict[str, Any]:
    """A unit of a kind."""
    heads = {3: (1,), 5: (0, 2), 21: (0, 1, 2)}
    return modules_of(kind, layers=(10, 20), heads=heads)


@pytest.fixture(scope="module")
def rig(one_rig: Any, engine_arguments: Any) -> Iterator[Any]:
    model = models.resolve(models.PACKAGED, None, print).path_or_id
    with one_rig(engine_arguments(model, {"stall_s": 0.5})) as rig:
        yield rig


@pytest.fixture(scope="module")
def prompts(rig: Any) -> list[list[int]]:
    tokenizer = rig.llm.get_tokenizer()
    return [tokenizer(text)["input_ids"] for text in TEXTS]


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
    rig.all_home()


@pytest.mark.parametrize("kind", all_kinds())
def test_a_unit_leaves_goes_on_and_comes_home_in_mid_stream(
    rig: Any, kind: str, prompts: list[list[int]], expected: Any, let_pass: Any
) -> None:
    one, other = rig.guest(), rig.guest()

    def travel() -> Generator[None, None, None]:
        yield from let_pass(3)
        yield from rig.away(sample(kind), one, gap=2)
        (unit,) = rig.do("status")["units"]
        yield from rig.on(unit["unit_id"], other, gap=2)

    assert rig.agrees(rig.run(prompts, NUM_TOKENS, travel()), expected)
    status = rig.do("status")
    assert [unit["guest_id"] for unit in status["units"]] == [other]
    assert rig.agrees(rig.run(prompts, NUM_TOKENS), expected), "wholly remote"
    (unit,) = status["units"]
    assert rig.agrees(rig.run(prompts, NUM_TOKENS, rig.on(unit["unit_id"], gap=3)), expected)
    assert rig.do("status")["units"] == []
    assert rig.agrees(rig.run(prompts, NUM_TOKENS), expected), "after the return"
    usage = rig.do("usage", other)
    assert usage["num_runs"] > 0
    assert usage["busy_s"] > 0


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
