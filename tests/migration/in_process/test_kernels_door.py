"""An engine and guests that attend with our kernels, as on a GPU: tokens are those of vLLM's own.

Float32, greedy; the kernels are the reference, on a CPU.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import pytest

pytestmark = pytest.mark.e2e

ENGINE = "qwen2, vllm"
NUM_TOKENS = 20
PARTS = 3
LENGTHS = 5, 40, 300
NUM_LAYERS = {"smollm2": 30, "qwen2": 6}
NUM_KV_HEADS = {"smollm2": 3, "qwen2": 2}


@pytest.fixture(scope="module", params=["qwen2", pytest.param("smollm2", marks=pytest.mark.long)])
def ends(request: pytest.FixtureRequest, engines: Any) -> Iterator[Any]:
    """The family, prompts, what an engine says that nothing was done to, and one to move."""
    family = request.param
    prompts = [
        [(7 * n + 3 * i) % 2000 + 5 for i in range(length)] for n, length in enumerate(LENGTHS)
    ]
    expected = engines.take(f"{family}, vllm").run(prompts, NUM_TOKENS)
    rig = engines.take(f"{family}, kernels")
    yield family, prompts, expected, rig
    rig.forget()


@pytest.fixture(autouse=True)
def _home(ends: Any) -> Iterator[None]:
    yield
    ends[-1].reset()


def test_layers_and_heads_leave_and_come_home_in_mid_stream(
    ends: Any, let_pass: Any, as_many_parts_as_can_be: None
) -> None:
    family, prompts, expected, rig = ends
    size = NUM_LAYERS[family] // 3
    layers = {"type": "layers", "start": size, "end": 2 * size}
    heads = {"type": "heads", "heads": [[0, [1]], [1, list(range(NUM_KV_HEADS[family]))]]}
    one, other, third = rig.guest(), rig.guest(), rig.guest()

    def there_and_on() -> Generator[None, None, None]:
        yield from let_pass(2)
        yield from rig.away(layers, one, gap=1)
        yield from rig.away(heads, other, gap=1)
        (unit,) = (u for u in rig.do("status")["units"] if u["guest_id"] == one)
        yield from rig.on(unit["unit_id"], third, gap=1)

    def home() -> Generator[None, None, None]:
        for unit in rig.do("status")["units"]:
            yield from rig.on(unit["unit_id"], gap=1)

    assert rig.agrees(rig.run(prompts, NUM_TOKENS, there_and_on()), expected)
    assert {unit["guest_id"] for unit in rig.do("status")["units"]} == {other, third}
    rig.do("overlap", PARTS)
    assert rig.agrees(rig.run(prompts, NUM_TOKENS), expected), "in parts"
    overlap = rig.do("status")["overlap"]
    assert (overlap["blocker"], overlap["steps_cut"] > 0) == ("", True)
    rig.do("overlap", 1)
    assert rig.agrees(rig.run(prompts, NUM_TOKENS, home()), expected)
    assert rig.do("status")["units"] == []
    assert all(rig.num_runs(guest) > 0 for guest in (one, other, third))


def test_older_blocks_leave_and_come_home_in_mid_stream(ends: Any, let_pass: Any) -> None:
    family, prompts, expected, rig = ends
    context = {"type": "context", "start": 1, "end": NUM_LAYERS[family] // 2}
    guest = rig.guest()

    def there_and_home() -> Generator[None, None, None]:
        yield from let_pass(4)
        yield from rig.away(context, guest)
        (unit,) = rig.do("status")["units"]
        assert unit["num_older_blocks"] > 0
        yield from let_pass(4)
        yield from rig.on(unit["unit_id"])

    assert rig.agrees(rig.run(prompts, NUM_TOKENS, there_and_home()), expected)
    assert rig.num_runs(guest) > 0
    assert rig.do("status")["units"] == []
