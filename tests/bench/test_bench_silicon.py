"""A run that the simulator itself made is replayed without error, with its constant found again."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest

from banaserve.base.errors import UserError
from banaserve.orchestrator.control.costs.profile import load
from banaserve_bench.plan.probe.model_shape import read_experts
from banaserve_bench.silicon.aiconfigurator import AiconfiguratorTimes
from banaserve_bench.silicon.linear import linear_fit
from benchmarks.silicon import (
    LinearTimes,
    RealRequest,
    RunReplay,
    WithAllReduces,
    errors,
    kv_tokens,
    read_run,
    with_told,
)

_PROFILE = "llama-3.1-8b-h100"
_CLOCKS_APART_S = 5000.0


def _record(n: int, queued_s: float = 0.0) -> dict[str, object]:
    arrival_s = 100.0 + n / 4
    return {
        "request_id": f"bench-{n}",
        "input_toks": 200 + 10 * n,
        "output_toks": 20,
        "arrival_time": arrival_s,
        "queued_ts": arrival_s + queued_s + _CLOCKS_APART_S,
        "first_token_ts": arrival_s + 0.5 + _CLOCKS_APART_S,
        "last_token_ts": arrival_s + 1.5 + _CLOCKS_APART_S,
    }


def _written(folder: Path, records: list[dict[str, object]]) -> Path:
    path = folder / "run.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    return path


def test_a_run_is_read_with_both_clocks_set_alike(tmp_path: Path) -> None:
    found = read_run(_written(tmp_path, [_record(1, 0.01), _record(0)]))
    assert [one.id for one in found] == ["bench-0", "bench-1"]
    assert found[0] == pytest.approx(("bench-0", 0.0, 200, 20, 0.5, 1.5))
    assert found[1].arrival_s == pytest.approx(0.25)


def test_a_run_that_lacks_a_value_is_one_error(tmp_path: Path) -> None:
    record = _record(0)
    del record["queued_ts"]
    with pytest.raises(UserError, match="a request lacks a value"):
        read_run(_written(tmp_path, [record]))
    with pytest.raises(UserError, match="holds no request"):
        read_run(_written(tmp_path, []))


def test_a_constant_is_found_again_on_the_half_that_is_not_fitted(tmp_path: Path) -> None:
    asked = read_run(_written(tmp_path, [_record(n) for n in range(40)]))
    profile = load(_PROFILE)
    limits = {"step_tokens": 2048, "max_requests": 64}
    times = LinearTimes(profile)
    made = RunReplay(asked, profile, limits).simulated(times, 2e-3)
    run = [
        RealRequest(
            one.id,
            one.arrival_s,
            one.prompt_tokens,
            one.output_tokens,
            one.arrival_s + float(made["ttft"][n]),
            one.arrival_s + float(made["latency"][n]),
        )
        for n, one in enumerate(asked)
    ]
    replay = RunReplay(run, profile, limits)
    assert 0 < replay.fitted.sum() < len(run)
    assert replay.fit(times) == 2e-3
    found = errors(replay.simulated(times, 2e-3), replay.real, ~replay.fitted)
    assert max(map(abs, found.values())) < 1e-9


def test_linear_times_are_found_again_from_steps() -> None:
    profile = load(_PROFILE)
    times = LinearTimes(profile)
    steps = [(0, 0, b, b * c) for b in (1, 8, 64) for c in (100, 4000)]
    steps += [
        (t, t * (t + 2 * h), b, 1000 * b) for t in (64, 2048) for h in (0, 512) for b in (0, 9)
    ]
    prefill, decode = linear_fit({step: times.step_s(*step) for step in steps})
    assert prefill.token_s == pytest.approx(profile.prefill.token_s)
    assert prefill.pair_s == pytest.approx(profile.prefill.pair_s)
    assert decode.fixed_s == pytest.approx(profile.decode_small.fixed_s)
    assert decode.request_s == pytest.approx(profile.decode_small.request_s)


def _given(folder: Path, **options: object) -> Namespace:
    names = ("model", "gpu_memory", "tensor_parallel", "max_requests", "step_tokens", "system")
    paths = {"run": folder / "run.jsonl.zst", "operators": folder / "gpu_tp1"}
    return Namespace(**dict.fromkeys(names), **paths | options)


def _tell(folder: Path, gpu: str, **engine: object) -> None:
    """Write what a run and its operators tell of themselves."""
    (folder / "gpu_meta.yaml").write_text(f"gpu: {gpu}\nmodel: meta-llama/Llama-3.1-8B\n")
    limits = {"max_num_seqs": 128, "max_num_batched_tokens": 2048}
    (folder / "run_meta.json").write_text(json.dumps({"engine_kwargs": limits | engine}))


def test_files_beside_run_and_operators_say_what_options_do_not(tmp_path: Path) -> None:
    _tell(tmp_path, "NVIDIA GeForce RTX 4090")
    found = with_told(_given(tmp_path))
    assert (found.model, found.gpu_memory) == ("meta-llama/Meta-Llama-3.1-8B", 24_564)
    assert (found.max_requests, found.step_tokens) == (128, 2048)
    assert (found.tensor_parallel, found.system) == (1, None)
    (tmp_path / "run_meta.json").unlink()
    with pytest.raises(UserError, match="no file says it: give --max-requests"):
        with_told(_given(tmp_path))


def test_a_run_on_several_gpus_needs_their_operators_and_all_reduces(tmp_path: Path) -> None:
    _tell(tmp_path, "NVIDIA RTX PRO 6000 Blackwell Server Edition", tensor_parallel_size=2)
    with pytest.raises(UserError, match=r"gpu_tp1 is no prefix .* parallel size 2"):
        with_told(_given(tmp_path))
    found = with_told(_given(tmp_path, operators=tmp_path / "gpu_tp2"))
    assert (found.tensor_parallel, found.system) == (2, "rtx_pro_6000_server")
    _tell(tmp_path, "NVIDIA GeForce RTX 4090", tensor_parallel_size=2)
    with pytest.raises(UserError, match="give --system"):
        with_told(_given(tmp_path, operators=tmp_path / "gpu_tp2"))


@pytest.mark.parametrize(
    ("name", "value"),
    [("data_parallel_size", 2), ("pipeline_parallel_size", 2), ("enable_expert_parallel", True)],
)
def test_other_parallelism_is_refused(tmp_path: Path, name: str, value: int) -> None:
    _tell(tmp_path, "NVIDIA GeForce RTX 4090", **{name: value})
    with pytest.raises(UserError, match=f"{name} is {value}: only tensor parallelism"):
        with_told(_given(tmp_path))


def test_all_reduces_are_added_to_the_steps_of_one_gpu() -> None:
    pytest.importorskip("aiconfigurator_core")
    alone = LinearTimes(load(_PROFILE))
    package = AiconfiguratorTimes("Qwen/Qwen3-32B", "rtx_pro_6000_server", 2)
    both = WithAllReduces(alone, package)
    decode, prompt = (0, 0, 64, 64_000), (2048, 2048**2, 64, 64_000)
    added = [both.step_s(*step) - alone.step_s(*step) for step in (decode, prompt)]
    assert added == pytest.approx([package.all_reduces_s(64), package.all_reduces_s(2112)])
    # Two all-reduces in each of 64 layers, each of at least 5 us and at most 100 GB/s.
    assert added[0] > 128 * 5e-6
    assert added[1] > 128 * 2112 * 5120 * 2 / 100e9


def test_experts_are_those_of_the_configuration(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"num_experts": 128, "num_experts_per_tok": 8}))
    assert read_experts(path) == (128, 8)
    path.write_text("{}")
    assert read_experts(path) is None


def test_the_kv_cache_has_the_memory_that_weights_leave() -> None:
    shape = load(_PROFILE).model
    tokens = kv_tokens(shape, 24_564)
    weights = 2 * (shape.num_layers * shape.layer_weights + shape.fixed_weights)
    left = 0.9 * 24_564 * 2**20 - 1.5 * 2**30 - weights
    assert 0 <= left - tokens * shape.num_layers * shape.layer_token_bytes < 2**20
    with pytest.raises(UserError, match="leave no KV cache"):
        kv_tokens(shape, 16_000)
    added = (0.9 * 24_564 * 2**20 - 1.5 * 2**30) / (shape.num_layers * shape.layer_token_bytes)
    assert kv_tokens(shape, 24_564, 2) - tokens == pytest.approx(added, abs=1)
