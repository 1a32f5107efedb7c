"""Layers and heads compute in a guest what the host does, in bfloat16 too: bit by bit.

Older blocks do not: parts of a sequence are merged in float32, so that the output is rounded to
bfloat16 otherwise than vLLM's, and near ties between tokens may fall otherwise.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Iterator
from typing import Any

import pytest

from rig import modules_of

pytestmark = pytest.mark.e2e

NUM_TOKENS = 32
HEADS = {1: (1,), 3: (0, 2)}
WITHIN = 1e-6
"""Of logprobs."""


@pytest.fixture(scope="module")
def rig(one_rig: Any, engine_arguments: Any, llama_of_large_heads: str) -> Iterator[Any]:
    arguments = engine_arguments(
        llama_of_large_heads,
        {"stall_s": 0.5},
        dtype="bfloat16",
        max_model_len=1024,
        skip_tokenizer_init=True,
    )
    with one_rig(arguments) as rig:
        yield rig


@pytest.mark.parametrize("kind", ["layers", "heads"])
def test_a_unit_leaves_and_comes_home_in_mid_stream(rig: Any, kind: str, let_pass: Any) -> None:
    draws = random.Random(5)
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
