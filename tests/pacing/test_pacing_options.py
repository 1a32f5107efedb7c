"""``--pace`` and ``--dilate``: what is refused, what runs, and what is said."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from safetensors.numpy import load_file

from banaserve.base import models
from banaserve.base.config.serve_config import MINIATURE, ServeConfig
from banaserve.base.errors import UserError
from banaserve.base.models import miniature
from banaserve.base.models.miniature import Miniature
from banaserve.cli.main import main
from banaserve.cli.serve import emulation
from banaserve.cli.serve.command_line import parse_serve_argv
from banaserve.orchestrator.control.costs import profile as profiles
from banaserve.pacing import miniatures
from banaserve.pacing.metrics import PacedTime
from banaserve.pacing.step_log import PacedStep, StepLog
from banaserve_bench.loadgen import modelled_time
from banaserve_bench.results.result import ModelledTime

OPT = profiles.BUILT_IN / "opt-13b-a100.toml"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--pace", "opt-13b-a10"], "unknown profile: opt-13b-a10"),
        (["--pace", "nowhere.toml"], "cannot read nowhere.toml"),
        (["--pace", "opt-13b-a100", "--dilate", "0"], "--dilate 0"),
        (["--pace", "opt-13b-a100", "--dilate", "nan"], "--dilate nan"),
        (["--pace", "opt-13b-a100", "--dilate", "much"], "--dilate"),
        (["--dilate", "4"], "--dilate stretches modelled time"),
        (["--pace", "opt-13b-a100,opt-13b-a100,opt-13b-a100"], "one for each of the 2 instances"),
        (["--pace", "opt-13b-a100,llama-13b-a100"], "profiles of two models"),
        (["--pace", "opt-13b-a100,"], "unknown profile: "),
        (["--model", MINIATURE], "needs --pace"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_starts(argv, words, capsys, monkeypatch):
    monkeypatch.setattr(models, "resolve", None)
    assert main(["serve", *argv]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert words in line


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("fixed_s = 18.10e-3", "fixed_s = 18.10", "prefill.fixed_s is 18.1: give at most 10"),
        ("num_layers = 40", "num_layers = 40_000", "model.num_layers is 40000: give at most"),
        ("num_heads = 40\nnum_kv", "num_heads = 39\nnum_kv", "[model]: hidden_size is no multiple"),
    ],
)
def test_a_profile_with_a_slip_is_refused_with_file_and_key(old, new, words, tmp_path):
    text = OPT.read_text()
    assert old in text
    path = tmp_path / "mine.toml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(UserError) as refused:
        emulation.profile_of(ServeConfig(pace=str(path)))
    assert str(refused.value).startswith(str(path))
    assert words in str(refused.value)


def test_a_miniature_runs_unless_a_model_is_named():
    assert parse_serve_argv(["--pace", "opt-13b-a100"]).model == MINIATURE
    assert parse_serve_argv(["--pace", "opt-13b-a100", "--model", "m"]).model == "m"
    config = parse_serve_argv(["--pace", "opt-13b-a100", "--dilate", "2.5"])
    assert (config.pace, config.dilate) == ("opt-13b-a100", 2.5)
    assert parse_serve_argv([]).model == models.PACKAGED


def test_instances_may_have_devices_of_their_own(tmp_path):
    text = OPT.read_text().replace("kv_tokens = 66_144", "kv_tokens = 33_072")
    other = tmp_path / "other.toml"
    other.write_text(text.replace('name = "opt-13b-a100"', 'name = "small"'))
    pace = f"opt-13b-a100,{other},opt-13b-a100"
    config = ServeConfig(model=MINIATURE, pace=pace, prefill=1, decode=2)
    options = emulation.vllm_options(config, tmp_path)
    settings = json.loads(options[options.index("--additional-config.banaserve_pacing") + 1])
    assert settings["profile"] == "opt-13b-a100"
    assert settings["devices"] == {"d0": str(other)}
    kv_bytes = int(options[options.index("--kv-cache-memory-bytes") + 1])
    alike = ServeConfig(model=MINIATURE, pace="opt-13b-a100", prefill=1, decode=2)
    usual = emulation.vllm_options(alike, tmp_path)
    assert kv_bytes < int(usual[usual.index("--kv-cache-memory-bytes") + 1])
    assert emulation.words(config).endswith(", d0 small")


def test_a_miniature_keeps_the_modelled_memory_in_tokens(tmp_path):
    config = ServeConfig(model=MINIATURE, pace="opt-13b-a100")
    options = emulation.vllm_options(config, tmp_path)
    kv_bytes = int(options[options.index("--kv-cache-memory-bytes") + 1])
    profile = profiles.load("opt-13b-a100")
    assert kv_bytes == 66_144 * miniatures.of(profile).token_bytes
    told = json.loads(options[options.index("--additional-config.banaserve_pacing") + 1])
    assert told == {"profile": "opt-13b-a100", "folder": str(tmp_path), "dilation": 1.0}
    own_model = emulation.vllm_options(ServeConfig(pace="opt-13b-a100"), tmp_path)
    assert "--kv-cache-memory-bytes" not in own_model


@pytest.mark.parametrize("given", [("--dtype", "bfloat16"), ("--dtype=bfloat16",)])
def test_a_miniature_computes_in_the_type_that_its_memory_is_sized_for(given, tmp_path):
    with pytest.raises(UserError, match="--dtype bfloat16: a miniature computes in float32"):
        emulation.vllm_options(
            ServeConfig(model=MINIATURE, pace="opt-13b-a100", vllm_argv=given), tmp_path
        )
    in_float32 = ServeConfig(model=MINIATURE, pace="opt-13b-a100", vllm_argv=("--dtype", "float32"))
    assert "float32" in emulation.vllm_options(in_float32, tmp_path)
    own_model = ServeConfig(pace="opt-13b-a100", vllm_argv=given)
    assert "--dtype" not in emulation.vllm_options(own_model, tmp_path)


def test_engines_that_cannot_be_paced_are_refused(tmp_path):
    config = ServeConfig(model=MINIATURE, pace="opt-13b-a100")
    for world_size, on_cpu in ((2, True), (1, False)):
        with pytest.raises(UserError, match="one GPU an instance"):
            emulation.begin(config, world_size, on_cpu, tmp_path)


def test_the_banner_says_that_time_is_modelled():
    words = emulation.words(ServeConfig(model=MINIATURE, pace="opt-13b-a100", dilate=4))
    assert words.startswith("MODELLED, not measured: opt-13b-a100 (DistServe")
    assert words.endswith("1 s of it takes 4 s")
    assert emulation.words(ServeConfig()) == ""


# ---- what runs


@pytest.mark.parametrize(
    ("modelled_shape", "expected"),
    [
        ((40, 40, 40), (8, 2, 2)),
        ((32, 32, 8), (8, 4, 2)),
        ((7, 6, 3), (7, 6, 3)),
        ((11, 1, 1), (1, 1, 1)),
    ],
)
def test_a_miniature_has_the_proportions_of_the_model(modelled_shape, expected):
    layers, heads, kv_heads = modelled_shape
    small = Miniature.of(layers, heads, kv_heads, 2048)
    assert (small.num_layers, small.num_heads, small.num_kv_heads) == expected


def test_a_miniature_is_made_once_and_its_tokenizer_works(tmp_path, monkeypatch):
    source = tmp_path / "packaged"
    source.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (source / name).write_text(name)
    known = {"vocab_size": 300, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    (source / "config.json").write_text(json.dumps(known))
    packaged = models.ResolvedModel("p", str(source), "p")
    monkeypatch.setattr(models, "resolve", lambda *_: packaged)
    small = Miniature(2, 4, 2, 128)
    said: list[str] = []
    made = miniature.resolve(small, "paced-x", tmp_path, said.append)
    again = miniature.resolve(small, "paced-x", tmp_path, said.append)
    assert made == again
    assert len(said) == 1
    assert made.served_name == "paced-x"
    folder = Path(made.path_or_id)
    assert (folder / "tokenizer.json").read_text() == "tokenizer.json"
    config = json.loads((folder / "config.json").read_text())
    assert (config["num_hidden_layers"], config["num_key_value_heads"]) == (2, 2)
    assert config["max_position_embeddings"] == 128
    weights = load_file(folder / "model.safetensors")
    assert weights["model.embed_tokens.weight"].shape == (300, 64)
    assert weights["model.layers.1.self_attn.q_proj.weight"].shape == (128, 64)
    assert all(w.dtype == np.float32 for w in weights.values())
    other = miniature.resolve(Miniature(1, 4, 2, 128), "x", tmp_path, said.append)
    assert other.path_or_id != made.path_or_id


# ---- what results say


def test_results_take_from_the_metrics_page_that_time_is_modelled(tmp_path):
    for name, overran in (("p0", True), ("d0", False)):
        log = StepLog(tmp_path / f"{name}.steps", 2.0)
        log.add(PacedStep(0.0, 2.0, 1.0, 2.5, 10, 0), overran)
    registry = CollectorRegistry()
    profile = profiles.load("opt-13b-a100")
    registry.register(PacedTime(profile, 2.0, tmp_path))
    page = generate_latest(registry).decode()
    assert 'banaserve_paced_steps_overrun_total{instance_id="p0"} 1.0' in page
    told = modelled_time.read(page)
    assert told == ModelledTime(profile.name, profile.source, 2.0, 2, 1, 0.25)
    assert told.words == "opt-13b-a100 (error of step times: unknown)"
    error = profiles.ErrorSection(ttft=0.056, tpot=0.037, latency=0.02)
    stated = CollectorRegistry()
    stated.register(PacedTime(replace(profile, error=error), 2.0, tmp_path))
    found = modelled_time.read(generate_latest(stated).decode())
    assert found is not None
    assert found.step_error == "TTFT 5.6%, TPOT 3.7%, latency 2.0%"
    assert modelled_time.read("# TYPE up gauge\nup 1\n") is None
