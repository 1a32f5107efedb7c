"""Model names, the cache of converted models, and the conversion itself on a tiny GGUF file."""

from __future__ import annotations

import errno
import json
import threading
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter

from banaserve import models
from banaserve.errors import UserError
from banaserve.models import cache, gguf, hub


def silent(text: str) -> None:
    """A progress callback that shows nothing."""


@pytest.fixture
def model_folder(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


# Names ------------------------------------------------------------------------------------------


def test_a_local_folder_is_served_under_the_name_it_was_given(model_folder):
    found = models.resolve(str(model_folder), None, silent)
    assert found == models.ResolvedModel(
        str(model_folder), str(model_folder), served_name=str(model_folder), is_local=True
    )


def test_a_folder_of_this_directory_comes_before_a_hub_id(model_folder, monkeypatch):
    monkeypatch.chdir(model_folder.parent)
    assert models.resolve("model", None, silent).path_or_id == str(model_folder)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("./nowhere", "there is no folder ./nowhere"),
        ("/nowhere/at/all", "there is no folder /nowhere"),
        ("~/no-such-model", "there is no folder ~/no-such-model"),
        ("empty", "holds no config.json"),
        ("model.gguf", "is a file"),
    ],
)
def test_a_path_to_no_model_is_refused(name, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "model.gguf").touch()
    with pytest.raises(UserError, match=words):
        models.resolve(name, None, silent)


@pytest.mark.parametrize(
    ("name", "repo_id"),
    [
        ("llama-13b", "meta-llama/Llama-2-13b-hf"),
        ("opt-13b", "facebook/opt-13b"),
        ("org/other", "org/other"),
    ],
)
def test_short_names_stand_for_hub_ids(name, repo_id, model_folder, monkeypatch):
    asked = []
    monkeypatch.setattr(hub, "fetch", lambda *args: asked.append(args[0]) or model_folder)
    found = models.resolve(name, None, silent)
    assert asked == [repo_id]
    assert found == models.ResolvedModel(name, str(model_folder), served_name=name, is_local=False)


# The hub ----------------------------------------------------------------------------------------


def hub_errors():
    """Errors of huggingface_hub and what a user must read about each."""
    from huggingface_hub import errors

    def answer(kind):
        error = kind.__new__(kind)
        Exception.__init__(error, "made by a test")
        return error

    return [
        (answer(errors.GatedRepoError), "is gated: ask for access"),
        (answer(errors.RepositoryNotFoundError), "there is no model smolm2-135m"),
        (errors.HFValidationError("made by a test"), "there is no model smolm2-135m"),
        (errors.LocalEntryNotFoundError("made by a test"), "cannot fetch smolm2-135m"),
        (ConnectionResetError(errno.ECONNRESET, "reset"), "cannot fetch smolm2-135m"),
        (errors.HfHubHTTPError.__bases__[0]("broken"), "cannot fetch smolm2-135m"),
        (OSError(errno.ENOSPC, "No space left on device"), "cannot keep smolm2-135m in"),
    ]


@pytest.mark.parametrize(("error", "words"), hub_errors())
def test_what_the_hub_says_becomes_one_line(error, words, monkeypatch):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(UserError, match=words) as caught:
        models.resolve("smolm2-135m", None, silent)
    message = str(caught.value)
    assert "\n" not in message
    if "gated" not in words and "keep" not in words:
        assert message.endswith("did you mean smollm2-135m?")


def test_offline_mode_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set and facebook/opt-13b is not in"):
        models.resolve("opt-13b", None, silent)


@pytest.mark.parametrize(("weights", "num_calls"), [("model.safetensors", 1), ("pytorch.bin", 2)])
def test_pickled_weights_are_fetched_only_where_there_are_no_others(
    weights, num_calls, model_folder, monkeypatch
):
    ignored = []

    def download(repo_id, ignore_patterns):
        ignored.append("*.bin" in ignore_patterns)
        if "*.bin" not in ignore_patterns or not weights.endswith(".bin"):
            (model_folder / weights).touch()
        return str(model_folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    models.resolve("org/name", None, silent)
    assert ignored == [True, False][:num_calls]


# The cache --------------------------------------------------------------------------------------


def write_one_file(folder: Path) -> None:
    (folder / "weights").write_bytes(b"12345")


@pytest.mark.parametrize(
    ("env", "root"),
    [
        ({"BANASERVE_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/banaserve"),
        ({"XDG_CACHE_HOME": ""}, str(Path("~/.cache/banaserve").expanduser())),
        ({}, str(Path("~/.cache/banaserve").expanduser())),
    ],
)
def test_the_cache_is_where_the_environment_says(env, root):
    assert cache.cache_root(env) == Path(root)


def test_a_folder_is_built_once_and_checked_after(tmp_path):
    folder = tmp_path / "models" / "m-1"
    assert cache.obtain(folder, write_one_file, silent)
    assert not cache.obtain(folder, write_one_file, silent)
    assert (folder / "weights").read_bytes() == b"12345"
    assert sorted(path.name for path in folder.parent.iterdir()) == [".m-1.lock", "m-1"]


@pytest.mark.parametrize("damage", ["changed", "shorter", "gone", "no manifest", "bad manifest"])
def test_a_damaged_folder_is_named_with_the_remedy(damage, tmp_path):
    folder = tmp_path / "m 1"
    cache.obtain(folder, write_one_file, silent)
    match damage:
        case "changed":
            (folder / "weights").write_bytes(b"12346")
        case "shorter":
            (folder / "weights").write_bytes(b"1")
        case "gone":
            (folder / "weights").unlink()
        case "no manifest":
            (folder / cache.MANIFEST).unlink()
        case "bad manifest":
            (folder / cache.MANIFEST).write_text('{"files": 1}')
    with pytest.raises(UserError, match=r"is damaged .*: remove it with `rm -r '.*/m 1'`"):
        cache.obtain(folder, write_one_file, silent)


def test_a_builder_that_fails_leaves_nothing(tmp_path):
    def fail(folder: Path) -> None:
        write_one_file(folder)
        raise UserError("no source")

    with pytest.raises(UserError, match="no source"):
        cache.obtain(tmp_path / "m", fail, silent)
    assert [path.name for path in tmp_path.iterdir()] == [".m.lock"]


def test_what_a_killed_builder_left_is_removed(tmp_path):
    (tmp_path / ".m.tmp-dead").mkdir()
    cache.obtain(tmp_path / "m", write_one_file, silent)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".m.lock", "m"]


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="BANASERVE_CACHE"):
        cache.obtain(tmp_path / "file" / "m", write_one_file, silent)


def test_a_full_disk_is_named(tmp_path):
    def fill(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(UserError, match="No space left on device"):
        cache.obtain(tmp_path / "m", fill, silent)


def test_of_two_that_start_at_once_one_builds(tmp_path):
    building, waited, built = threading.Event(), threading.Event(), []

    def build(folder: Path) -> None:
        building.set()
        assert waited.wait(timeout=30)
        write_one_file(folder)
        built.append(folder)

    first = threading.Thread(target=cache.obtain, args=(tmp_path / "m", build, silent))
    first.start()
    assert building.wait(timeout=30)
    was_built = cache.obtain(tmp_path / "m", build, lambda text: waited.set())
    first.join()
    assert not was_built
    assert len(built) == 1


# The conversion ---------------------------------------------------------------------------------

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
    assert (found.served_name, found.is_local) == ("smollm2-135m", False)
    assert (Path(found.path_or_id) / "model.safetensors").is_file()
    assert said
    monkeypatch.setattr(models, "packaged_source", lambda: None)
    assert models.resolve("smollm2-135m", tmp_path / "cache", silent) == found
    with pytest.raises(UserError, match="make install"):
        models.resolve("smollm2-135m", tmp_path / "another", silent)
