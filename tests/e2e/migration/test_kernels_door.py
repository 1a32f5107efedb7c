"""An engine and guests that attend with our kernels, as on a GPU: tokens are those of vLLM's own.

Float32, greedy; the kernels are the reference, on a CPU.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from banaserve import models

pytestmark = pytest.mark.e2e

NUM_TOKENS = 20
PARTS = 3
LENGTHS = 5, 40, 300
BLOCK_SIZE = 32
TINY = {
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "initializer_range": 0.08,
    "vocab_size": 2048,
    "max_position_embeddings": 1024,
}
NUM_LAYERS = {"smollm2": 30, "qwen2": 6}
NUM_KV_HEADS = {"smollm2": 3, "qwen2": 2}


def tiny_qwen(folder: Path) -> str:
    """Random, float32, with heads of a size that the kernels take."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    config = AutoConfig.for_model("qwen2", **TINY)
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module", params=["qwen2", pytest.param("smollm2", marks=pytest.mark.long)])
def ends(
    request: pytest.FixtureRequest,
    many_rigs: Any,
    engine_arguments: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Any]:
    """The family, prompts, what an engine says that nothing was done to, and one to move."""
    family = request.param
    if family == "qwen2":
        model = tiny_qwen(tmp_path_factory.mktemp("tiny"))
    else:
        model = models.resolve(models.PACKAGED, None, print).path_or_id
    sizes = {"kv_cache_memory_bytes": 96 << 20, "max_model_len": 1024, "block_size": BLOCK_SIZE}
    every = [
        engine_arguments(model, {"attention": door}, skip_tokenizer_init=True, **sizes)
        for door in ("vllm", "kernels")
    ]
    prompts = [
        [(7 * n + 3 * i) % 2000 + 5 for i in range(length)] for n, length in enumerate(LENGTHS)
    ]
    started = many_rigs(every)
    expected = next(started).run(prompts, NUM_TOKENS)
    yield family, prompts, expected, next(started)
    started.close()


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
    assert all(rig.do("usage", guest)["num_runs"] > 0 for guest in (one, other, third))


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
    assert rig.do("usage", guest)["num_runs"] > 0
    assert rig.do("status")["units"] == []
