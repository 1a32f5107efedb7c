"""Layers of other families: what a decoder layer takes and returns is bound by name."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import pytest

pytestmark = pytest.mark.e2e

ENGINE = "opt"

NUM_TOKENS = 24
PARTS = 3
LAYERS = {"type": "layers", "start": 2, "end": 5}
# Steps are not cut, and the reason.
UNCUT = {"deepseek_v2": "MLA"}
# A latent is of all heads at once.
HEADS = {"opt": [[0, [0, 2]], [1, [1, 2, 3]]], "deepseek_v2": []}


@pytest.fixture(
    scope="module",
    params=[
        "opt",
        "mixtral",
        "deepseek_v2",
        # Of the shape of Llama, which the other files run.
        pytest.param("qwen2", marks=pytest.mark.long),
        pytest.param("mistral", marks=pytest.mark.long),
    ],
)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def rig(engines: Any, family: str) -> Iterator[Any]:
    rig = engines.take(family)
    yield rig
    rig.forget()


def test_tokens_do_not_change(
    rig: Any, family: str, let_pass: Any, as_many_parts_as_can_be: None
) -> None:
    prompts = [
        [(7 * n + 3 * i) % 2000 + 5 for i in range(length)] for n, length in enumerate((5, 40, 300))
    ]
    heads = HEADS.get(family, [[0, [1]], [1, [0]]])
    expected = rig.run(prompts, NUM_TOKENS)
    assert rig.agrees(rig.run(prompts, NUM_TOKENS), expected)
    one, other, third = rig.guest(), rig.guest(), rig.guest()

    def travel() -> Generator[None, None, None]:
        yield from let_pass(2)
        yield from rig.away(LAYERS, one, gap=1)
        if heads:
            yield from rig.away({"type": "heads", "heads": heads}, other, gap=1)

    assert rig.agrees(rig.run(prompts, NUM_TOKENS, travel()), expected)
    assert rig.agrees(rig.run(prompts, NUM_TOKENS), expected), "wholly remote"
    if why := UNCUT.get(family, ""):
        assert why in rig.ask("overlap", PARTS)["error"]
    else:
        rig.do("overlap", PARTS)
        before = rig.do("status")["overlap"]
        assert rig.agrees(rig.run(prompts, NUM_TOKENS), expected), "in parts"
        after = rig.do("status")["overlap"]
        assert (after["blocker"], after["steps_cut"] > before["steps_cut"]) == ("", True)

    def home() -> Generator[None, None, None]:
        layers, *some_heads = sorted(rig.do("status")["units"], key=lambda u: u["guest_id"])
        yield from rig.on(layers["unit_id"], third, gap=1)
        for unit in some_heads:
            yield from rig.on(unit["unit_id"], gap=1)
        yield from rig.on(layers["unit_id"], gap=1)

    assert rig.agrees(rig.run(prompts, NUM_TOKENS, home()), expected)
    assert rig.do("status")["units"] == []
