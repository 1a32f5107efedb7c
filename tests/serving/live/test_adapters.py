"""LoRA adapters are replaced while a server runs: answers are by the weights that are there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import written_prompts
from adapter_files import RANK, write_adapter
from banaserve.base import models
from banaserve_bench.loadgen.servers import banaserve_server

pytestmark = [pytest.mark.e2e, pytest.mark.long]

NUM_LAYERS, HIDDEN, KV_HIDDEN = 30, 576, 192
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def door() -> Iterator[httpx.Client]:
    options = ("--dtype", "float32", "--max-model-len", "2048")
    adapters = ("--enable-lora", "--max-lora-rank", str(RANK), "--max-loras", "2")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
        environment.setenv("VLLM_SERVER_DEV_MODE", "1")
        with (
            banaserve_server(models.PACKAGED, *options, *adapters, "--migration", "off") as server,
            httpx.Client(base_url=server.url, timeout=120.0) as client,
        ):
            yield client


@pytest.fixture(scope="module")
def prompt() -> str:
    """Longer than a block, so that its beginning is kept."""
    (made,) = written_prompts.prompts("synthetic", 1, 300, 300, 4, str.split)
    return made.text


def write(folder: Path, seed: int) -> None:
    write_adapter(folder, seed, NUM_LAYERS, HIDDEN, KV_HIDDEN)


def load(door: httpx.Client, name: str, folder: Path, **more: Any) -> None:
    body = {"lora_name": name, "lora_path": str(folder), **more}
    answer = door.post("/v1/load_lora_adapter", json=body)
    assert answer.status_code == 200, answer.text


def answered(door: httpx.Client, name: str, prompt: str) -> list[int]:
    body = {"model": name, "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0}
    answer = door.post("/v1/completions", json={**body, "return_token_ids": True})
    assert answer.status_code == 200, answer.text
    return list(answer.json()["choices"][0]["token_ids"])


def test_an_adapter_that_was_replaced_answers_by_its_own_weights(
    door: httpx.Client, prompt: str, tmp_path: Path
) -> None:
    one, two, changing = tmp_path / "one", tmp_path / "two", tmp_path / "changing"
    write(one, 1)
    write(two, 2)
    load(door, "one", one)
    load(door, "two", two)
    expected = [answered(door, name, prompt) for name in ("one", "two")]
    assert expected[0] != expected[1]

    write(changing, 1)
    load(door, "changing", changing)
    assert answered(door, "changing", prompt) == expected[0]
    assert answered(door, "changing", prompt) == expected[0]
    write(changing, 2)
    unloaded = door.post("/v1/unload_lora_adapter", json={"lora_name": "changing"})
    assert unloaded.status_code == 200, unloaded.text
    load(door, "changing", changing)
    assert answered(door, "changing", prompt) == expected[1]
    write(changing, 1)
    load(door, "changing", changing, load_inplace=True)
    assert answered(door, "changing", prompt) == expected[0]


def test_weights_of_the_model_stay(door: httpx.Client, prompt: str) -> None:
    before = answered(door, "smollm2-135m", prompt)
    refused = door.post("/collective_rpc", json={"method": "reload_weights"})
    assert refused.status_code == 501, refused.text
    assert "restart it" in refused.json()["error"]["message"]
    assert answered(door, "smollm2-135m", prompt) == before
