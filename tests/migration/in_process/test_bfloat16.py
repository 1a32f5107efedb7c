"""Layers and heads compute in a guest what the host does, in bfloat16 too: bit by bit.

Older blocks do not: parts of a sequence are merged in float32, so that the output is rounded to
bfloat16 otherwise than vLLM's, and near ties between tokens may fall otherwise.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Iterator
from typing import Any

import pytest

from depth import chosen_seed
from rig import modules_of

pytestmark = pytest.mark.e2e

ENGINE = "llama, bfloat16"
NUM_TOKENS = 32
HEADS = {1: (1,), 3: (0, 2)}
WITHIN = 1e-6
"""Of logprobs."""


@pytest.fixture(autouse=True)
def _home(rig: Any) -> Iterator[None]:
    yield
    rig.reset()


@pytest.mark.parametrize("kind", ["layers", "heads"])
def test_a_unit_leaves_and_comes_home_in_mid_stream(rig: Any, kind: str, let_pass: Any) -> None:
    draws = random.Random(chosen_seed(5))
    prompt = [[draws.randrange(2048) for _ in range(300)]]
    rig.run(prompt, NUM_TOKENS)  # the prompt's blocks are cached from here on
    expected = rig.run(prompt, NUM_TOKENS)
    modules = modules_of(kind, layers=(2, 5), heads=HEADS)

    def travel() -> Generator[None, None, None]:
        yield from let_pass(3)
        yield from rig.away(modules, rig.guest(), gap=2)

    assert rig.agrees(rig.run(prompt, NUM_TOKENS, travel()), expected, WITHIN)
    assert rig.agrees(rig.run(prompt, NUM_TOKENS), expected, WITHIN), "wholly remote"
    (unit,) = rig.do("status")["units"]
    assert rig.agrees(rig.run(prompt, NUM_TOKENS, rig.on(unit["unit_id"], gap=3)), expected, WITHIN)
    assert rig.agrees(rig.run(prompt, NUM_TOKENS), expected, WITHIN), "after the return"
