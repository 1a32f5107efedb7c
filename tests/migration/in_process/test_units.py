"""What every kind of unit of a dense model can do, with equal tokens; greedy, float32, real model.

Those of others: ``test_experts``.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import pytest

from rig import kinds_with_kv, modules_of

pytestmark = pytest.mark.e2e

ENGINE = "smollm2"
NUM_TOKENS = 24
PARTS = 3
TEXTS = (
    "The capital of France is",
    "Once upon a time there was a little girl who",
    "List the planets of the solar system in order:",
    "The history of the Roman Empire began " + "and then the empire grew larger. " * 40,
    "def fibonacci(n):",
)


def sample(kind: str) -> dict[str, Any]:
    """A unit of a kind."""
    heads = {3: (1,), 5: (0, 2), 21: (0, 1, 2)}
    return modules_of(kind, layers=(10, 20), heads=heads)


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
    return again


@pytest.fixture(autouse=True)
def _home(rig: Any, expected: Any) -> Iterator[None]:
    yield
    rig.reset()


@pytest.mark.parametrize("kind", kinds_with_kv())
def test_a_unit_leaves_goes_on_and_comes_home_in_mid_stream(
    rig: Any,
    kind: str,
    prompts: list[list[int]],
    expected: Any,
    let_pass: Any,
    as_many_parts_as_can_be: None,
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
    rig.do("overlap", PARTS)
    before = rig.do("status")["overlap"]["steps_cut"]
    assert rig.agrees(rig.run(prompts, NUM_TOKENS), expected), "wholly remote, in parts"
    was_cut = rig.do("status")["overlap"]["steps_cut"] > before
    assert was_cut == (kind == "layers"), "guests of other kinds are waited for"
    rig.do("overlap", 1)
    (unit,) = status["units"]
    assert rig.agrees(rig.run(prompts, NUM_TOKENS, rig.on(unit["unit_id"], gap=3)), expected)
    assert rig.do("status")["units"] == []
    assert rig.agrees(rig.run(prompts, NUM_TOKENS), expected), "after the return"
    assert rig.num_runs(other) > 0


@pytest.mark.parametrize("transport", ["tcp", "torch_distributed"])
def test_units_travel_by_every_transport(
    rig: Any, transport: str, prompts: list[list[int]], expected: Any, let_pass: Any
) -> None:
    """To a guest that might be on another machine, from there to one here, and home."""
    far, near = rig.new_guest(transport=transport), rig.guest()
    kinds = kinds_with_kv() if transport == "tcp" else ["layers"]

    def travel(kind: str) -> Generator[None, None, None]:
        yield from let_pass(2)
        yield from rig.away(sample(kind), far, gap=2)
        (unit,) = rig.do("status")["units"]
        yield from rig.on(unit["unit_id"], near, gap=2)
        yield from rig.on(unit["unit_id"], gap=2)

    for kind in kinds:
        assert rig.agrees(rig.run(prompts, NUM_TOKENS, travel(kind)), expected), kind
        assert rig.do("status")["units"] == []
    assert rig.num_runs(far) > 0
