"""Closed loops that the simulator itself made with known constants are met by fitted ones."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest

from banaserve.base.errors import UserError
from banaserve.orchestrator.control.costs.profile import load
from banaserve_bench.silicon.costs import EngineConstants
from benchmarks.closed_loop import LAUNCHES, RunConstants
from benchmarks.silicon import LinearTimes
from benchmarks.whole_runs import KnownEngine, WholeRun, errors, fitted, read_runs

_MADE = RunConstants(EngineConstants(2e-3, 5e-5, 1.25, 1.5), way_s=0.03, way_token_s=2e-5)
_ENGINE = RunConstants(EngineConstants(1e-3, 2e-5))
_HAS_PACKAGE = find_spec("aiconfigurator_core") is not None


def _run(clients: int, prompt_tokens: int, output_tokens: int) -> WholeRun:
    name = f"{clients}-{prompt_tokens}-{output_tokens}"
    return WholeRun(
        name, "m", "gpu", "fp8", "0.19.0", 1, False, clients, prompt_tokens, output_tokens, 1.0, 1.0
    )


@pytest.mark.parametrize("launch_s", [0.0, 0.06])
def test_fitted_constants_give_the_means_again(launch_s: float) -> None:
    made = _MADE._replace(engine=replace(_MADE.engine, launch_s=launch_s))
    engine = KnownEngine(LinearTimes(load("llama-3.1-8b-h100")), 500_000)
    asked = [_run(c, p, o) for c in (2, 8, 32) for p, o in ((200, 100), (2000, 60), (4000, 200))]
    found = [engine.simulated(run, made) for run in asked]
    runs = [
        run._replace(ttft_s=one.ttft_s, tpot_s=one.tpot_s)
        for run, one in zip(asked, found, strict=True)
    ]
    constants = fitted(runs, {run.engine: engine for run in runs})
    assert constants.engine.launch_s == launch_s
    wrong = errors(runs, [engine.simulated(run, constants) for run in runs])
    tpot, ttft, latency = abs(wrong).mean(axis=0)
    assert max(tpot, latency) < 0.05
    assert ttft < 0.1


@pytest.mark.parametrize("launch_s", [0.0, 0.2])
@pytest.mark.parametrize("clients", [1, 8, 64])
def test_times_to_tokens_are_the_sums_of_their_parts(clients: int, launch_s: float) -> None:
    engine = KnownEngine(LinearTimes(load("llama-3.1-8b-h100")), 500_000)
    known = replace(_MADE.engine, launch_s=launch_s)
    found = engine.simulated(_run(clients, 4000, 100), _MADE._replace(engine=known))
    of_gpu = [known.decode_factor, known.prompt_factor]
    constants = [*of_gpu, known.host_s, known.host_request_s, 1.0]
    ttft_s = found.first_parts @ np.array([*constants, _MADE.way_s, _MADE.way_token_s])
    assert bool(found.first_parts[LAUNCHES]) is bool(launch_s)
    assert found.ttft_s == pytest.approx(ttft_s, rel=1e-4)
    assert found.tpot_s == pytest.approx(found.parts @ np.array(constants), rel=1e-9)


def test_a_client_sends_its_next_request_when_the_last_one_has_ended() -> None:
    run = _run(1, 100, 10)
    alone = KnownEngine(LinearTimes(load("llama-3.1-8b-h100")), 500_000).simulated(run, _ENGINE)
    # One request at a time: each token but the first takes one step with one request.
    assert alone.parts[1:] == pytest.approx([0.0, 1.0, 1.0, 0.0])


@pytest.mark.skipif(_HAS_PACKAGE, reason="the package is there")
def test_without_the_package_the_error_says_what_to_install() -> None:
    with pytest.raises(UserError, match=r"pip install 'banaserve-bench\[plan\]'"):
        read_runs()


@pytest.mark.skipif(not _HAS_PACKAGE, reason="the package is not there")
def test_no_run_is_both_fitted_and_judged() -> None:
    runs = read_runs()
    sides = ({run.configuration for run in runs if run.is_fitted is even} for even in (True, False))
    assert not set.intersection(*sides)
    assert len(runs) > 1000
