"""benchmarks/measure_profile.py: what is made of step times, whatever the engine was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from banaserve.orchestrator.control.costs import profile
from banaserve.orchestrator.control.costs.profile import DecodeSection, PrefillSection
from banaserve.orchestrator.control.costs.steps import StepCosts
from banaserve_bench.plan.probe.fit import StepFit, fitted
from benchmarks import measure_profile

PREFILL = PrefillSection(fixed_s=0.02, token_s=1e-3, pair_s=2e-7)
DECODE = DecodeSection(fixed_s=0.03, context_token_s=3e-6, request_s=2e-3)


@pytest.fixture
def script() -> Any:
    return measure_profile


def steps_of(script: Any) -> dict[str, list[Any]]:
    """What an engine would take that had exactly these coefficients."""

    def step(tokens: int, batch: int, context: int) -> Any:
        work_s = tokens * PREFILL.token_s + tokens**2 * PREFILL.pair_s
        work_s += batch * (context * DECODE.context_token_s + DECODE.request_s)
        fixed_s = DECODE.fixed_s if batch else PREFILL.fixed_s
        return script.MeasuredStep(tokens, batch, context, (fixed_s + work_s,))

    return {
        "prefill": [step(tokens, 0, 0) for tokens in script.PROMPTS],
        "decode": [step(0, batch, context) for batch, context in script.DECODES],
        "mixed": [step(tokens, batch, context) for batch, context, tokens in script.MIXED],
    }


def test_coefficients_are_found_again_and_predict_steps_of_both_kinds(script: Any) -> None:
    steps = steps_of(script)
    fit = StepFit.of(steps["prefill"], steps["decode"])
    for found, real in ((fit.prefill, PREFILL), (fit.decode, DECODE)):
        for name in real.__slots__:
            assert getattr(found, name) == pytest.approx(getattr(real, name), rel=1e-6)
    for kind in steps:
        assert max(fit.errors_of(steps[kind])) < 1e-6


def test_no_coefficient_is_negative() -> None:
    """Times whose growth falls, as chance has it: pairs then cost next to nothing."""
    features = [(1, tokens, tokens**2) for tokens in (10, 100, 1000, 2000)]
    seconds = [0.01 + 1e-3 * tokens - 1e-7 * tokens**2 for tokens in (10, 100, 1000, 2000)]
    found = fitted(features, seconds)
    assert found[2] == 1e-12
    assert found[0] > 0
    assert found[1] == pytest.approx(1e-3, rel=0.2)


def test_what_is_written_is_a_profile_that_gives_these_times(script: Any, tmp_path: Path) -> None:
    path = tmp_path / "measured.toml"
    path.write_text(script.written(StepFit(PREFILL, DECODE), {"decode": [0.01, 0.034]}))
    read = profile.load(str(path))
    assert "decode 3%" in path.read_text()
    assert read.model.token_bytes == 46_080
    assert read.memory.kv_tokens * read.model.token_bytes <= script.KV_BYTES
    costs = StepCosts(read)
    step_s, work_s = costs.mixed_s(512, 512 * 512, 8, 8 * 128)
    assert work_s == pytest.approx(512e-3 + 512**2 * 2e-7 + 8 * (128 * 3e-6 + 2e-3))
    assert step_s == pytest.approx(0.03 + work_s)
