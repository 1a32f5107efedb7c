"""What `banaserve plan probe` refuses, each in one line, and what it assumes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from banaserve.base.errors import UserError
from banaserve.cli.main import main
from banaserve.orchestrator.control.costs.profile import ModelSection
from banaserve_bench.loadgen.target import ServerUnderTest
from banaserve_bench.plan.probe import measuring
from banaserve_bench.plan.probe.command import ProbeOptions, unseen_parts
from banaserve_bench.plan.probe.model_shape import read_shape
from banaserve_bench.plan.probe.server_facts import ServerMetrics, metrics_of
from canned_openai import CannedOpenAi, canned_openai, tokens

RUNNING = b'vllm:num_requests_running{engine="0"} 2.0\nvllm:num_requests_waiting{engine="0"} 1.0\n'
ENGINES = b"".join(
    b'vllm:cache_config_info{engine="%d",block_size="16",num_gpu_blocks="10"} 1.0\n' % n
    for n in range(2)
)
DENSE = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 100,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
    "torch_dtype": "float32",
}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[CannedOpenAi]:
    monkeypatch.setattr(measuring, "_IDLE_AGAIN_S", 0.0)
    with canned_openai() as canned:
        yield canned


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["plan", "probe", *argv]) == 2
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1, shown.err
    assert not shown.out
    return shown.err


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        # Right answers, all of whose tokens come in one piece.
        (None, "something gathers the pieces of a stream"),
        ((200, b'{"choices": [{"text": "whole"}]}'), "the server streams no tokens"),
        ((200, b"data: {\xff\xfe\x00}\n\ndata: [DONE]\n\n"), "the server streams no tokens"),
        ((200, b"\x00\x1b]0;" + b"\xff" * 5000), "the server streams no tokens"),
        ((200, tokens(20, None)), "the server tells no usage"),
        ((400, b'{"message": "no such field"}'), "it must take token ids, ignore_eos and"),
        ((503, b"overloaded"), "a request failed: HTTP 503: overloaded"),
    ],
)
def test_a_server_that_cannot_be_measured_is_one_line(
    answer: tuple[int, bytes] | None,
    words: str,
    server: CannedOpenAi,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server.answer = answer
    assert words in refused(capsys, "--url", server.url)
    [first, *_] = server.bodies
    assert first["stream"] is True
    assert first["return_token_ids"] is True
    assert first["ignore_eos"] is True


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        (RUNNING, "under other load (3 requests): probe it while it serves nothing else"),
        (ENGINES, "has 2 engines: probe a server of one"),
        # A page that is none of metrics says nothing.
        (b"vllm:num_requests_running{{{\xff\n<html>", "only 0 steps"),
    ],
)
def test_a_server_that_serves_others_is_one_line(
    metrics: bytes, words: str, server: CannedOpenAi, capsys: pytest.CaptureFixture[str]
) -> None:
    server.metrics = metrics
    assert words in refused(capsys, "--url", server.url)


def test_no_server_a_wrong_key_and_wrong_options_are_one_line(
    server: CannedOpenAi, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.key = "secret"
    key = tmp_path / "key"
    key.write_text("secret\n")
    assert "give its --api-key" in refused(capsys, "--url", server.url)
    assert "only 0 steps" in refused(capsys, "--url", server.url, "--api-key-file", str(key))
    assert "is it running?" in refused(capsys, "--url", "http://127.0.0.1:9")
    assert "serves canned, not x" in refused(
        capsys, "--url", server.url, "--api-key", "secret", "--served-model", "x"
    )
    assert "arguments are required: --url" in refused(capsys)
    for words, message in (
        (("--duration", "1"), "--duration 1: give 10 s or more"),
        (("--save", "x.json"), "give a name that ends in .toml"),
        (("--save", str(tmp_path / "none" / "x.toml")), "there is no folder"),
        (("--kv-tokens", "0"), "--kv-tokens 0: must be at least 1"),
        (("--like", "llama-3.1-8b-h10"), "mean llama-3.1-8b-h100?"),
        (("--model", str(tmp_path / "none")), "No such file"),
    ):
        argv = ("--url", server.url, "--api-key", "secret", *words)
        assert message in refused(capsys, *argv)


def test_what_a_probe_cannot_see_is_given_told_or_named_as_assumed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    told = ServerUnderTest("http://x", "m", 300, str(tmp_path))
    options = ProbeOptions(url="http://x")
    unseen = unseen_parts(options, told, ServerMetrics(kv_tokens=1600, block_tokens=32))
    assert unseen.profile.model.num_layers == 4
    assert unseen.profile.model.max_context_tokens == 300
    assert (unseen.profile.memory.kv_tokens, unseen.profile.memory.block_tokens) == (1600, 32)
    assert [one.partition(" ")[0] for one in unseen.assumed] == ["link", "steps"]
    silent = unseen_parts(options, ServerUnderTest("http://x", "m", None, None), ServerMetrics())
    assert [one.partition(" ")[0] for one in silent.assumed] == [
        "shape",
        "context",
        "KV",
        "link",
        "steps",
    ]
    given = ProbeOptions(url="http://x", model=tmp_path, kv_tokens=99, link_bandwidth=1e9)
    unseen = unseen_parts(given, told, ServerMetrics(kv_tokens=1600))
    assert (unseen.profile.memory.kv_tokens, unseen.profile.link.bytes_per_s) == (99, 1e9)
    assert [one.partition(" ")[0] for one in unseen.assumed] == ["steps"]


def read_shape_of(path: Path, changes: dict[str, object]) -> ModelSection:
    path.write_text(json.dumps({**DENSE, **changes}))
    return read_shape(path.parent)


def test_the_shape_of_a_model_is_read_from_its_configuration(tmp_path: Path) -> None:
    path = tmp_path / "config.json"

    dense = read_shape_of(path, {})
    assert dense.layer_weights == 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 100 + 2 * 64
    assert dense.fixed_weights == 2 * 64_000
    assert dense.element_bytes == 4
    assert read_shape_of(path, {"tie_word_embeddings": True}).fixed_weights == 64_000
    experts = read_shape_of(path, {"num_experts": 8, "moe_intermediate_size": 10})
    assert experts.layer_weights == 2 * 64 * 64 + 2 * 64 * 32 + 8 * 3 * 64 * 10 + 2 * 64
    # Heads that are wider than hidden_size / num_attention_heads keep their bytes of KV.
    wide = read_shape_of(path, {"head_dim": 32})
    assert wide.layer_token_bytes == 2 * 2 * 32 * 4
    inner = read_shape_of(path, {"text_config": {"num_hidden_layers": 7}})
    assert inner.num_layers == 7
    for changes, words in (
        ({"kv_lora_rank": 512}, "latent attention"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_attention_heads": "4"}, "num_attention_heads is '4'"),
        ({"num_key_value_heads": 3}, "no multiple of num_kv_heads"),
    ):
        with pytest.raises(UserError, match=words):
            read_shape_of(path, changes)
    for text in ("[1]", "{", '{"a": ' * 100_000):
        path.write_text(text)
        with pytest.raises(UserError, match=r"config\.json is n"):
            read_shape(path)


def test_metrics_of_other_servers_are_read_too() -> None:
    assert metrics_of("sglang:num_running_reqs 2\nsglang:num_queue_reqs 1\n").num_requests == 3
    assert metrics_of("vllm:num_requests_running_more 5\n").num_requests is None
    page = 'vllm:cache_config_info{engine="0",block_size="16",num_gpu_blocks="None"} 1.0\n'
    assert metrics_of(page) == ServerMetrics()
