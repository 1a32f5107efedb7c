"""Step times are the sums of the measured operators, in between, padded and beyond the tables."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from banaserve.base.errors import UserError
from banaserve.orchestrator.control.costs.profile import load
from banaserve.orchestrator.control.costs.steps import StepCosts
from banaserve_bench.silicon.costs import EngineConstants, MeasuredCosts
from banaserve_bench.silicon.interpolation import Grid
from banaserve_bench.silicon.operator_files import read_operators
from banaserve_bench.silicon.step_times import OperatorSums, graph_sizes
from operator_tables import write_alphas, write_operators

_LAYERS = 4
_US = 1e-6
_PER_TOKEN = 7
"""Microseconds of a layer for each token: six operators, one of them twice."""


@pytest.fixture
def times(tmp_path: Path) -> OperatorSums:
    return read_operators(write_operators(tmp_path), _LAYERS)


@pytest.mark.parametrize(
    ("at", "value"),
    [
        ((1,), 10.0),
        ((3,), 30.0),
        ((0.5,), 10.0),
        ((9,), 90.0),
    ],
)
def test_a_grid_of_one_coordinate(at: tuple[float, ...], value: float) -> None:
    assert Grid([(1, 10.0), (5, 50.0), (2, 20.0)])(*at) == pytest.approx(value)


def test_a_grid_whose_second_points_differ_with_the_first() -> None:
    grid = Grid([(0, 0, 0.0), (0, 10, 10.0), (2, 5, 25.0), (2, 15, 35.0)])
    assert grid(0, 5) == pytest.approx(5.0)
    assert grid(2, 10) == pytest.approx(30.0)
    assert grid(1, 10) == pytest.approx(20.0)
    with pytest.raises(ValueError, match="measured point"):
        Grid([])


def test_a_decode_step(times: OperatorSums) -> None:
    # 8 requests of 100 tokens each.
    expected_us = _LAYERS * (8 * _PER_TOKEN + 800) + 8 + 80
    assert times.step_s(0, 0, 8, 800) == pytest.approx(expected_us * _US)


def test_a_prefill_step_of_one_chunk_after_computed_tokens(times: OperatorSums) -> None:
    tokens, computed = 1000, 512
    pairs = tokens * (tokens + 2 * computed)
    expected_us = _LAYERS * (tokens * _PER_TOKEN + tokens + computed) + tokens + 10
    assert times.step_s(tokens, pairs, 0, 0) == pytest.approx(expected_us * _US)


def test_a_mixed_step_has_measurements_of_its_own(times: OperatorSums) -> None:
    tokens, batch, context = 256, 32, 200
    attention_us = tokens + 2 * batch * context
    computed = tokens + batch
    expected_us = _LAYERS * (computed * _PER_TOKEN + attention_us) + computed + 10 * (batch + 1)
    found = times.step_s(tokens, tokens**2, batch, batch * context)
    assert found == pytest.approx(expected_us * _US)


def test_unequal_contexts_lie_between_equal_ones_of_the_mean_and_the_largest(
    tmp_path: Path, times: OperatorSums
) -> None:
    prefix = write_operators(tmp_path)
    write_alphas(
        prefix,
        "0,n<=8,sr<=40%,kvB<=1k,kp=0,0.25",
        "0,n<=8,sr<=40%,kvB>1k,kp=0,-0.5",
        "0,n<=8,sr>40%,kvB>1k,kp=0,1",
        "256,n<=8,sr<=40%,kvB<=1k,kp=0,0.5",
        "256,n<=8,sr<=40%,kvB<=1k,kp<=2k,0.75",
    )
    unequal = read_operators(prefix, _LAYERS)
    # Contexts of 100, 100, 100 and 500 tokens, and ten times as many: a quarter of the way.
    cases = [
        ((0, 0, 4, 800), (100, 500, 800), 0.25),
        ((0, 0, 4, 8000), (1000, 5000, 8000), -0.5),
        ((200, 200**2, 4, 800), (100, 500, 800), 0.5),
        ((200, 200 * 1200, 4, 800), (100, 500, 800), 0.75),
        # A bucket that is not there, and contexts that are equal.
        ((0, 0, 4, 1700), (100, 500, 1700), 0.0),
        ((0, 0, 4, 800), (200, 200, 800), 0.0),
    ]
    for step, contexts, alpha in cases:
        equal_s = times.step_s(*step)
        more_s = times.step_s(*step[:3], step[2] * contexts[1]) - equal_s
        found_s = unequal.step_s(*step, partial(tuple, contexts))
        assert found_s == pytest.approx(equal_s + alpha * more_s)
        assert unequal.step_s(*step) == times.step_s(*step, partial(tuple, contexts)) == equal_s
    costs = MeasuredCosts(load("llama-3.1-8b-h100"), unequal, None, lambda: (100, 500, 800))
    first_s, growth_s, _ = costs.decode_run(4, 800)
    assert first_s == costs.mixed_s(0, 0, 4, 800)[0] > times.step_s(0, 0, 4, 800)
    # Later, all contexts are longer by as much.
    assert growth_s == pytest.approx(_LAYERS * 4 * _US)


def test_several_prompts_are_never_slower_than_one_of_all_tokens(times: OperatorSums) -> None:
    one = times.step_s(1024, 1024**2, 0, 0)
    assert times.step_s(1024, 4 * 256**2, 0, 0) <= one
    assert times.step_s(1024, 1024**2 + 2 * 1024 * 512, 0, 0) > one


def test_a_decode_step_is_padded_to_the_next_graph(tmp_path: Path) -> None:
    padded = read_operators(write_operators(tmp_path), _LAYERS, None, graph_sizes(256))
    plain = read_operators(write_operators(tmp_path), _LAYERS)
    assert padded.step_s(0, 0, 16, 1600) == plain.step_s(0, 0, 16, 1600)
    # 9 requests compute 16 tokens: 7 more, in each layer and once.
    more_us = 7 * (_LAYERS * _PER_TOKEN + 1)
    assert padded.step_s(0, 0, 9, 900) - plain.step_s(0, 0, 9, 900) == pytest.approx(
        more_us * _US, rel=1e-6
    )
    assert padded.step_s(0, 0, 300, 3000) == plain.step_s(0, 0, 300, 3000)


def test_sizes_of_graphs() -> None:
    assert graph_sizes(16) == (1, 2, 4, 8, 16)
    assert graph_sizes(512)[-3:] == (480, 496, 512)


def test_experts_take_the_time_of_those_that_get_tokens(tmp_path: Path) -> None:
    prefix = write_operators(tmp_path)
    dense = read_operators(prefix, _LAYERS)
    sparse = read_operators(prefix, _LAYERS, (8, 2))
    more_us = (sparse.step_s(0, 0, 1, 16) - dense.step_s(0, 0, 1, 16)) / _US
    assert more_us == pytest.approx(_LAYERS * 5)
    assert sparse.step_s(0, 0, 64, 1024) - dense.step_s(0, 0, 64, 1024) == pytest.approx(
        _LAYERS * 80 * _US, rel=1e-3
    )


def test_costs_add_the_cpu_and_keep_what_changes_while_an_engine_runs(
    times: OperatorSums,
) -> None:
    profile = load("llama-3.1-8b-h100")
    costs = MeasuredCosts(profile, times, EngineConstants(1e-3, 1e-5, 1.5))
    step_s, work_s = costs.mixed_s(0, 0, 8, 800)
    assert step_s == pytest.approx(1.5 * times.step_s(0, 0, 8, 800) + 1e-3 + 8e-5)
    mixed_s, _ = costs.mixed_s(64, 64**2, 8, 800)
    assert mixed_s == pytest.approx(times.step_s(64, 64**2, 8, 800) + 1e-3 + 8e-5)
    assert 0 < work_s < step_s
    launched = MeasuredCosts(profile, times, EngineConstants(1e-3, launch_s=0.5))
    assert launched.mixed_s(64, 64**2, 8, 800) == (0.5 + 1e-3, 0.0)
    assert launched.mixed_s(0, 0, 8, 800)[0] == times.step_s(0, 0, 8, 800) + 1e-3
    costs.slowdown, costs.hop_s = 2.0, 0.5
    assert costs.mixed_s(0, 0, 8, 800)[0] == pytest.approx(2 * step_s + 0.5)
    assert MeasuredCosts(profile, times).coefficients(8) == StepCosts(profile).coefficients(8)


def test_a_run_of_decode_steps_grows_as_single_steps_do(times: OperatorSums) -> None:
    costs = MeasuredCosts(load("llama-3.1-8b-h100"), times, EngineConstants(1e-3))
    first_s, growth_s, _ = costs.decode_run(8, 800)
    assert first_s == costs.mixed_s(0, 0, 8, 800)[0]
    later_s, _ = costs.mixed_s(0, 0, 8, 800 + 5 * 8)
    assert first_s + 5 * growth_s == pytest.approx(later_s)


@pytest.mark.parametrize(
    ("part", "text", "error"),
    [
        ("dense", "layer,tokens,time_us\nqkv,1,2\n", "line 2: layer 'qkv'"),
        ("dense", "layer,tokens,time_us\nqkv_proj,1,fast\n", "line 2: give numbers"),
        ("per_sequence", "layer,sequences,time_us\nlm_head,1,-1\n", "line 2: a value"),
        ("attention", "prefill_chunk\n1\n", "line 2: give numbers"),
        ("dense", "layer,tokens,time_us\n", "a grid needs a measured point"),
        ("attention", "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us\n", "needs rows"),
        ("skew_fit", "pc,n_label\n0,n<=8\n", "gpu_model_tp1_skew_fit.csv: a row lacks"),
    ],
)
def test_a_wrong_file_is_one_error(tmp_path: Path, part: str, text: str, error: str) -> None:
    prefix = write_operators(tmp_path)
    prefix.with_name(f"{prefix.name}_{part}.csv").write_text(text)
    with pytest.raises(UserError, match=error):
        read_operators(prefix, _LAYERS)


def test_a_missing_file_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*gpu_dense\.csv"):
        read_operators(tmp_path / "gpu", _LAYERS)
