"""Layers of other families: what a decoder layer takes and returns is bound by name."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.e2e

NUM_TOKENS = 24
PARTS = 3
SIZES = {
    "hidden_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "vocab_size": 2048,
    "max_position_embeddings": 1024,
}
GROUPED = {"num_key_value_heads": 2, "intermediate_size": 256, "initializer_range": 0.08}
FAMILIES = {
    "opt": {"ffn_dim": 256, "word_embed_proj_dim": 128, "init_std": 0.08},
    "qwen2": GROUPED,
    "mistral": {**GROUPED, "sliding_window": None, "head_dim": 32},
    "mixtral": {**GROUPED, "num_local_experts": 4, "sliding_window": None},
}
LAYERS = {"type": "layers", "start": 2, "end": 5}


def save(family: str, folder: Path) -> str:
    """A random model, float32, the same for the same family."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    config = AutoConfig.for_model(family, **SIZES, **FAMILIES[family])
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def rigs(
    request: pytest.FixtureRequest,
    many_rigs: Any,
    engine_arguments: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Any]:
    """One after the other, of the families whose tests are to run, in their order."""
    chosen = [
        item.callspec.params["family"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.originalname == "test_tokens_do_not_change"
    ]
    every = [
        engine_arguments(
            save(family, tmp_path_factory.mktemp(family)),
            skip_tokenizer_init=True,
            max_model_len=1024,
            kv_cache_memory_bytes=64 << 20,
        )
        for family in chosen
    ]
    started = many_rigs(every)
    yield started
    started.close()


# Of the shape of Llama, which the other files run.
LIKE_LLAMA = ("qwen2", "mistral")


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[pytest.mark.long] if family in LIKE_LLAMA else [])
        for family in FAMILIES
    ],
)
def test_tokens_do_not_change(
    rigs: Any, family: str, let_pass: Any, as_many_parts_as_can_be: None
) -> None:
    rig = next(rigs)
    prompts = [
        [(7 * n + 3 * i) % 2000 + 5 for i in range(length)] for n, length in enumerate((5, 40, 300))
    ]
    heads = [[0, [1]], [1, [0]]] if family != "opt" else [[0, [0, 2]], [1, [1, 2, 3]]]
    expected = rig.run(prompts, NUM_TOKENS)
    assert rig.agrees(rig.run(prompts, NUM_TOKENS), expected)
    one, other, third = rig.guest(), rig.guest(), rig.guest()

    def travel() -> Generator[None, None, None]:
        yield from let_pass(2)
        yield from rig.away(LAYERS, one, gap=1)
        yield from rig.away({"type": "heads", "heads": heads}, other, gap=1)

    assert rig.agrees(rig.run(prompts, NUM_TOKENS, travel()), expected)
    assert rig.agrees(rig.run(prompts, NUM_TOKENS), expected), "wholly remote"
    rig.do("overlap", PARTS)
    before = rig.do("status")["overlap"]
    assert rig.agrees(rig.run(prompts, NUM_TOKENS), expected), "in parts"
    after = rig.do("status")["overlap"]
    assert (after["blocker"], after["steps_cut"] > before["steps_cut"]) == ("", True)

    def home() -> Generator[None, None, None]:
        layers, some_heads = sorted(rig.do("status")["units"], key=lambda u: u["guest_id"])
        yield from rig.on(layers["unit_id"], third, gap=1)
        yield from rig.on(some_heads["unit_id"], gap=1)
        yield from rig.on(layers["unit_id"], gap=1)

    assert rig.agrees(rig.run(prompts, NUM_TOKENS, home()), expected)
    assert rig.do("status")["units"] == []
