"""The conversion of a GGUF file, on a tiny one that the tests write."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter

from banaserve.base import models
from banaserve.base.errors import UserError
from banaserve.base.models import gguf

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN = 16, 4, 2, 4, 32
BYTES = "".join(chr(code) for code in range(33, 127)) + "Ġ"
TOKENS = ["<|end|>", "<|start|>", *BYTES, "Ġt", "he"]
SHAPES = {
    "attn_q": (HEADS * HEAD_DIM, HIDDEN),
    "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_output": (HIDDEN, HEADS * HEAD_DIM),
    "ffn_gate": (FFN, HIDDEN),
    "ffn_up": (FFN, HIDDEN),
    "ffn_down": (HIDDEN, FFN),
    "attn_norm": (HIDDEN,),
    "ffn_norm": (HIDDEN,),
}


def write_gguf(path: Path, architecture: str = "llama", extra: str | None = None):
    """A one-layer model; returns its tensors under their GGUF names."""
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_block_count(1)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3] + [1] * (len(TOKENS) - 2))
    writer.add_token_merges(["Ġ t", "h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    rng = np.random.default_rng(0)
    names = {f"blk.0.{part}.weight": shape for part, shape in SHAPES.items()}
    names |= {"token_embd.weight": (len(TOKENS), HIDDEN), "output_norm.weight": (HIDDEN,)}
    if extra:
        names[extra] = (len(TOKENS), HIDDEN)
    tensors = {name: rng.standard_normal(shape, np.float32) for name, shape in names.items()}
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def silent(text: str) -> None:
    """A progress callback that shows nothing."""


@pytest.fixture
def converted(tmp_path):
    tensors = write_gguf(tmp_path / "m.gguf")
    target = tmp_path / "out"
    target.mkdir()
    gguf.convert(tmp_path / "m.gguf", target, silent)
    return tensors, target


def permute(weights, num_heads):
    """What llama.cpp does to the rows of q and k when it makes a GGUF file."""
    rows, columns = weights.shape
    return (
        weights.reshape(num_heads, 2, rows // num_heads // 2, columns)
        .swapaxes(1, 2)
        .reshape(rows, columns)
    )


def test_weights_arrive_under_their_names_in_bf16(converted):
    import torch
    from safetensors.torch import load_file

    tensors, target = converted
    loaded = load_file(target / "model.safetensors")
    assert set(loaded) == {gguf.hugging_face_name(name) for name in tensors}
    for name, weights in tensors.items():
        found = loaded[gguf.hugging_face_name(name)].float().numpy()
        if "attn_q" in name:
            found = permute(found, HEADS)
        elif "attn_k" in name:
            found = permute(found, KV_HEADS)
        expected = torch.from_numpy(weights).bfloat16().float().numpy()
        np.testing.assert_array_equal(found, expected, err_msg=name)


def test_the_config_says_what_the_file_says(converted):
    config = json.loads((converted[1] / "config.json").read_text())
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "head_dim": HEAD_DIM,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "max_position_embeddings": 64,
        "num_attention_heads": HEADS,
        "num_hidden_layers": 1,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "vocab_size": len(TOKENS),
    }
    assert expected.items() <= config.items()
    generation = json.loads((converted[1] / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 0, "pad_token_id": 0}


def test_an_output_layer_of_its_own_is_not_tied(tmp_path):
    write_gguf(tmp_path / "m.gguf", extra="output.weight")
    gguf.convert(tmp_path / "m.gguf", tmp_path, silent)
    assert not json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"]


def test_the_tokenizer_merges_splits_digits_and_knows_its_special_tokens(converted):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(converted[1] / "tokenizer.json"))
    text = "<|start|> the 12"
    encoded = tokenizer.encode(text)
    assert encoded.tokens == ["<|start|>", "Ġt", "he", "Ġ", "1", "2"]
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == text
    settings = json.loads((converted[1] / "tokenizer_config.json").read_text())
    assert (settings["bos_token"], settings["eos_token"]) == ("<|start|>", "<|end|>")
    assert (converted[1] / "chat_template.jinja").read_text() == "{{ messages[0]['content'] }}"


@pytest.mark.parametrize(
    ("architecture", "extra", "words"),
    [
        ("qwen2", None, "only .'llama', 'gpt2'. is known"),
        ("llama", "blk.0.ffn_gate_inp.weight", "a tensor blk.0.ffn_gate_inp.weight"),
    ],
)
def test_another_model_is_refused(architecture, extra, words, tmp_path):
    write_gguf(tmp_path / "m.gguf", architecture, extra)
    with pytest.raises(UserError, match=words):
        gguf.convert(tmp_path / "m.gguf", tmp_path, silent)


def test_a_file_that_is_no_gguf_is_refused(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"not a model at all" * 10)
    with pytest.raises(UserError, match="is not a usable GGUF file"):
        gguf.convert(tmp_path / "m.gguf", tmp_path, silent)


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, 1.00390625, 1.01171875, -3.4e38, 1e-40, 0.1])
def test_bf16_is_rounded_as_torch_rounds_it(value):
    import torch

    expected = torch.tensor([value]).bfloat16().view(torch.uint16).numpy()
    np.testing.assert_array_equal(gguf.to_bf16(np.array([value], np.float32)), expected)


def test_smollm2_comes_from_its_package_through_the_cache(tmp_path, monkeypatch):
    write_gguf(tmp_path / "m.gguf")
    monkeypatch.setattr(models, "packaged_source", lambda: tmp_path / "m.gguf")
    said: list[str] = []
    found = models.resolve("smollm2-135m", tmp_path / "cache", said.append)
    assert found.served_name == "smollm2-135m"
    assert (Path(found.path_or_id) / "model.safetensors").is_file()
    assert said
    monkeypatch.setattr(models, "packaged_source", lambda: None)
    assert models.resolve("smollm2-135m", tmp_path / "cache", silent) == found
    with pytest.raises(UserError, match="make install"):
        models.resolve("smollm2-135m", tmp_path / "another", silent)
